"""Rules kept from Megatron-LM of 2021 give the values that its code gave."""

import json

import pytest

from shoal.config.load import load_config, validate
from shoal.train.scaler import LossScaler
from shoal.train.schedule import learning_rate
from tests.shared import SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared goldens, which are not there")


def cases(name):
    path = SHARED / "data/megatron/goldens" / name
    return json.loads(path.read_text())["cases"] if path.exists() else []


def schedule(peak, style, fraction, horizon):
    kind = style if style in ("cosine", "linear") else "constant"
    values = {"kind": f"megatron_{kind}", "warmup_fraction": fraction, "decay_steps": horizon}
    return validate({"optimizer": {"lr": peak}, "schedule": values, "train": {"steps": 1}}, "golden")


@pytest.mark.parametrize("case", cases("lr_schedule.json"), ids=lambda case: case["case"])
def test_megatron_schedules_give_the_recorded_rates(case):
    inputs = case["inputs"]
    config = schedule(inputs["lr"], inputs["lr_decay_style"], inputs["warmup"], case["end_iter"])
    for taken, rate in case["n_and_lr"]:
        assert learning_rate(config, taken + 1) == pytest.approx(rate, rel=1e-12, abs=1e-18), taken


def test_the_preset_gives_the_printed_rates_of_documented_runs_with_their_skipped_steps():
    golden = json.loads((SHARED / "goldens/gpt2_345m.json").read_text())["schedule"]
    assert len(golden["rows"]) == 11
    for row in golden["rows"]:
        config = load_config("megatron-345m", {"train": {"steps": row["E"]}})
        # What was printed at an iteration is the rate of the next step.
        rate = learning_rate(config, row["iteration"] + 1, row["skipped"])
        assert f"{rate:.3E}" == row["lr"]


def scaler(inputs, start):
    return LossScaler(
        scale=start["cur_scale"],
        window=int(inputs["scale_window"]),
        hysteresis=inputs["delayed_shift"],
        min_scale=inputs["min_scale"],
        dynamic=True,
        forgiving=start["cur_hysteresis"],
    )


@pytest.mark.parametrize("case", cases("loss_scaler.json"), ids=lambda case: case["case"])
def test_the_loss_scale_follows_the_recorded_trajectory(case):
    if case["state_at_start"]["consecutive_hysteresis"]:
        pytest.skip("consecutive hysteresis could not be reached from Megatron's command line either")
    ours = scaler(case["inputs"], case["state_at_start"])
    states = []
    for overflow, times in case["overflow_runs"]:
        for _ in range(times):
            ours.update(bool(overflow))
            states.append([ours.scale, ours.forgiving])
    if "after_each_update" in case:
        assert states == [row[:2] for row in case["after_each_update"]["rows"]]
    else:
        for number, scale, forgiving in case["changes"]["rows"]:
            assert states[number - 1] == [scale, forgiving], number
    assert ours.scale == case["state_at_end"]["cur_scale"]


def test_the_scales_of_documented_runs_reproduce_with_their_overflows():
    precision = load_config("megatron-345m", {}).precision
    golden = json.loads((SHARED / "goldens/gpt2_345m.json").read_text())["loss_scale"]
    for row in golden["rows"]:
        ours = LossScaler.of(precision, fp16=True)
        assert all(ours.update(overflow=True) for _ in range(row["overflows"]))
        assert ours.scale == row["scale"]
