"""guard.late: steps that are judged while the next one runs."""

import json

import numpy as np
import pytest

from shoal.config.layout import parse_layout, settings_of
from shoal.config.load import validate
from shoal.config.rules import check
from shoal.errors import ConfigError
from tests.cases import every
from tests.train.ranks import refusal_of_poisoned, run_training, tiny_config

LATE = {"late": True}


FREE = {"nonfinite": "warn", "spike_factor": 0.0}


@pytest.mark.parametrize(
    ("words", "checks"),
    every(3, [("zero2x2", {}), ("dp2", FREE), ("dp2", {}), ("pp2", FREE), ("tp2", {})]),
)
def test_weights_and_records_are_those_of_steps_judged_at_once(pool, data, tmp_path, words, checks):
    shared = {
        "parallel": settings_of(parse_layout(words)),
        "optimizer": {"lr": 1e-2, "clip": 0.5},
        "train": {"steps": 9, "log_every": 4},
        "checkpoint": {"every": 3},
        "eval": {"every": 7},
    }
    at_once, late = (
        pool.run(run_training, 2, tmp_path / name, tiny_config(data, **shared, guard=guard))[0]
        for name, guard in (("at-once", checks), ("late", checks | LATE))
    )
    assert (
        max(line["grad_norm"] for line in at_once["lines"] if "grad_norm" in line) > 0.5
    )  # so some were clipped
    kept = ("step", "lr", "applied", "skipped")
    assert [[line.get(key) for key in kept] for line in late["lines"]] == [
        [line.get(key) for key in kept] for line in at_once["lines"]
    ]
    assert [line["validation_loss"] for line in late["lines"] if "validation_loss" in line] == pytest.approx(
        [line["validation_loss"] for line in at_once["lines"] if "validation_loss" in line], rel=1e-6
    )
    assert late["losses"] == pytest.approx(at_once["losses"], rel=1e-6)
    assert late["norms"] == pytest.approx(at_once["norms"], rel=1e-6)  # rounded as memory is aligned
    for name, weight in at_once["weights"].items():
        np.testing.assert_allclose(late["weights"][name], weight, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(pool, data, tmp_path):
    values = tiny_config(data, train={"steps": 9, "log_every": 100}, guard=LATE)
    [whole] = pool.run(run_training, 1, tmp_path / "whole", values)
    for stop_after in (4, 0):
        part = values | {"runtime": {**values["runtime"], "stop_after": stop_after}}
        [parts] = pool.run(run_training, 1, tmp_path / "parts", part)
    assert (parts["steps"], parts["losses"]) == (whole["steps"], pytest.approx(whole["losses"], rel=1e-6))
    states = [tmp_path / name / "checkpoints/step-00000009/state.json" for name in ("whole", "parts")]
    seen = [json.loads(state.read_text())["guard"]["seen"] for state in states]
    assert seen == [9, 9]


def test_a_step_found_bad_ends_the_run_before_anything_is_saved(pool, data, tmp_path):
    values = tiny_config(data, checkpoint={"every": 2}, guard=LATE)
    for refusal in pool.run(refusal_of_poisoned, 2, tmp_path, values):
        assert "step 3: loss or gradient norm is not finite" in refusal
        assert "the step was taken before it was judged and nothing was saved" in refusal
    incident = json.loads((tmp_path / "incidents.jsonl").read_text())
    assert (incident["step"], incident["samples"]) == (3, list(range(32, 48)))
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"guard": {"nonfinite": "skip"}}, "guard.nonfinite = skip has to know"),
        ({"guard": {"spike": "skip"}}, "guard.spike = skip has to know"),
        ({"precision": {"dtype": "fp16"}}, "precision.dtype = fp16 has to know"),
        ({"sync": {"strategy": "onebit"}}, "sync.strategy = onebit has to know"),
    ],
)
def test_what_has_to_know_before_the_step_is_refused(sections, named):
    sections["guard"] = {**sections.get("guard", {}), **LATE}
    with pytest.raises(ConfigError, match=named):
        check(validate(tiny_config("data", **sections), "test"), dp=1)


def test_a_spike_that_is_not_looked_for_may_be_skipped():
    check(validate(tiny_config("data", guard={"spike": "skip", "spike_factor": 0.0} | LATE), "test"), dp=1)
