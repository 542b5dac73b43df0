"""The comparison of training speed: what it says of figures, and of a system that does not run."""

import time

from benchmarks.systems import Cell
from benchmarks.train_step import TINY, measure, summary
from tests.tiny_dataset import random_dataset


def entry(system, rate, workload="gpt2", *, compiled=True):
    return {
        "workload": workload,
        "system": system,
        "dtype": "bf16",
        "compiled": compiled,
        "tokens_per_s": [rate] if rate else [],
        "median_tokens_per_s": rate,
    }


def test_each_system_is_compared_at_its_own_best():
    results = [
        entry("shoal", 90.0),
        entry("shoal", 120.0, compiled=False),
        entry("transformers", 80.0),
        entry("litgpt", 100.0),
    ]
    line = summary(results)["gpt2"]
    assert (line["fastest_peer"], line["ratio_to_fastest_peer"]) == ("litgpt", 1.2)
    assert line["shoal"]["compiled"] is False
    assert line["aim_tokens_per_s"] == 460_000


def test_a_workload_that_shoal_did_not_run_has_no_ratio():
    line = summary([entry("shoal", None), entry("transformers", 80.0)])["gpt2"]
    assert "ratio_to_fastest_peer" not in line


def test_a_system_that_fails_is_told_and_the_others_go_on(tmp_path):
    data = random_dataset(tmp_path / "data")
    cells = [Cell(TINY, system, "fp32", compiled=False) for system in ("shoal", "nonsense")]
    ours, theirs = measure(
        cells, data, tmp_path / "cells", repeats=2, steps=3, warmup=1, deadline=time.monotonic() + 100
    )
    assert [len(steps) for steps in ours["step_s"]] == [3, 3]
    assert ours["phases"]["forward_s"] > 0
    assert "nonsense" in theirs["failed"]
