"""Calibration: the median ratio by phase, drawn to 1 where few steps were measured."""

import json

import pytest

from shoal.errors import InputError
from shoal.plan.calibration import add_measurement, calibrated
from shoal.plan.step_time import PHASES, StepTime

PREDICTED = dict.fromkeys(PHASES, 0.0) | {"forward": 1.0, "backward": 2.0, "optimiser": 0.5}


def add(folder, factor, steps=20, setting="", **phases):
    measured = {name: seconds * factor for name, seconds in PREDICTED.items()} | phases
    seconds = sum(measured[n] for n in PHASES if n not in ("tp", "shard"))
    add_measurement(
        "cpu", "fp32", PREDICTED, measured, seconds=seconds, steps=steps, setting=setting, folder=folder
    )


def after(folder, setting="", device="cpu"):
    return calibrated(StepTime(PREDICTED), device, "fp32", setting=setting, folder=folder).phases


def test_without_measurements_nothing_changes(tmp_path):
    assert after(tmp_path) == PREDICTED


def test_phases_come_nearer_to_what_was_measured_the_more_steps_there_are(tmp_path):
    add(tmp_path, 1.5, steps=2)
    few = after(tmp_path)["forward"]
    add(tmp_path, 1.5, steps=200)
    assert 1 < few < after(tmp_path)["forward"] < 1.5
    assert after(tmp_path)["forward"] == pytest.approx(1.5, rel=0.01)


def test_one_wild_run_among_several_changes_little(tmp_path):
    for factor in (1.2, 1.2, 15.0, 1.2):
        add(tmp_path, factor)
    assert after(tmp_path)["backward"] == pytest.approx(2.4, rel=0.02)


def test_runs_of_the_same_setting_count_before_others(tmp_path):
    add(tmp_path, 1.2, setting="dp2")
    add(tmp_path, 2.0, setting="tp2")
    assert after(tmp_path, "dp2")["forward"] < 1.3
    assert 1.2 < after(tmp_path, "pp2")["forward"] < 2


def test_another_device_is_not_calibrated(tmp_path):
    add(tmp_path, 1.5)
    assert after(tmp_path, device="h100") == PREDICTED


def test_waiting_within_a_pass_is_corrected_by_itself(tmp_path):
    predicted = PREDICTED | {"forward": 2.0, "backward": 3.0, "tp": 2.0}
    measured = predicted | {"forward": 2.5, "backward": 4.5, "tp": 4.0}
    add_measurement("cpu", "fp32", predicted, measured, seconds=7.5, steps=10_000, folder=tmp_path)
    found = calibrated(StepTime(predicted), "cpu", "fp32", folder=tmp_path).phases
    assert found["tp"] == pytest.approx(4.0, rel=0.01)
    assert found["forward"] + found["backward"] == pytest.approx(7.0, rel=0.01)


def test_seconds_outside_of_all_phases_are_learnt(tmp_path):
    add_measurement("cpu", "fp32", PREDICTED, PREDICTED, seconds=7.0, steps=10_000, folder=tmp_path)
    step = calibrated(StepTime(PREDICTED), "cpu", "fp32", folder=tmp_path)
    assert step.total == pytest.approx(7.0, rel=0.01)


@pytest.mark.parametrize(
    "ratios",
    [
        {"cpu fp32": {"sleep": [[1, 1]]}},
        {"a": {"data": [[1e9, 1]]}},
        {"a": {"data": [[1, 0]]}},
        [1],
        {"a": 3},
    ],
)
def test_another_file_is_refused(tmp_path, ratios):
    (tmp_path / "calibration.json").write_text(json.dumps({"version": 1, "ratios": ratios}))
    with pytest.raises(InputError, match="is not a calibration file"):
        after(tmp_path)
