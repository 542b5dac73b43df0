"""The comparison of training speed: what it says of figures, and of a system that does not run."""

import time

import pytest

from benchmarks.c_library import SETTINGS
from benchmarks.systems import Cell
from benchmarks.train_step import TINY, arguments, measure, run_grid, summary
from tests.tiny_dataset import random_dataset


def entry(system, rate, workload="gpt2", *, compiled=True, with_settings=False):
    return {
        "workload": workload,
        "system": system,
        "dtype": "bf16",
        "compiled": compiled,
        "with_settings": with_settings,
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


def test_peers_with_the_settings_of_the_c_library_have_a_ratio_of_their_own():
    """A peer that is faster with them does not stand in for how it comes, nor the other way round."""
    results = [entry("shoal", 120.0), entry("bare", 80.0), entry("litgpt", 96.0)]
    results += [entry("bare", 150.0, with_settings=True), entry("litgpt", 100.0, with_settings=True)]
    line = summary(results)["gpt2"]
    assert (line["fastest_peer"], line["ratio_to_fastest_peer"]) == ("litgpt", 1.25)
    assert line["fastest_peer_with_settings"] == "bare with C library settings"
    assert line["ratio_to_fastest_peer_with_settings"] == 0.8
    assert line["bare"]["median_tokens_per_s"] == 80.0


def test_what_shoal_sets_reaches_a_peer_that_is_to_have_it_and_no_other():
    came, has = (Cell(TINY, "bare", "fp32", False, given).environment for given in (False, True))
    assert came == {"OMP_NUM_THREADS": "1"}
    assert has == came | SETTINGS
    assert has["GOMP_SPINCOUNT"] == Cell(TINY, "shoal", "fp32", False).environment["GOMP_SPINCOUNT"]


@pytest.mark.proof
def test_each_peer_runs_as_it_comes_and_with_settings(tmp_path):
    wish = arguments(["--tiny", "--repeats", "1", "--steps", "2", "--warmup", "1", "--modes", "eager"])
    wish.dtypes = ["fp32"]
    results = run_grid(wish, [TINY], ["shoal", "bare"], tmp_path, lambda *kept: None)
    assert [(entry["system"], entry["with_settings"]) for entry in results] == [
        ("shoal", False),
        ("bare", False),
        ("bare", True),
    ]
    assert all(entry["median_tokens_per_s"] > 0 for entry in results)


def test_a_workload_that_shoal_did_not_run_has_no_ratio():
    line = summary([entry("shoal", None), entry("transformers", 80.0)])["gpt2"]
    assert "ratio_to_fastest_peer" not in line


@pytest.mark.proof
def test_a_system_that_fails_is_told_and_the_others_go_on(tmp_path):
    data = random_dataset(tmp_path / "data")
    cells = [Cell(TINY, system, "fp32", compiled=False) for system in ("shoal", "nonsense")]
    ours, theirs = measure(
        cells, data, tmp_path / "cells", repeats=2, steps=3, warmup=1, deadline=time.monotonic() + 100
    )
    assert [len(steps) for steps in ours["step_s"]] == [3, 3]
    assert ours["phases"]["forward_s"] > 0
    assert "nonsense" in theirs["failed"]
