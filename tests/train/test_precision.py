"""fp16 with its loss scale, bf16 on the wire, and the other optimisers, in real runs."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal.config.sections import Optimizer
from shoal.train.optimiser import build_optimiser
from tests.cases import every
from tests.train.ranks import run_training, tiny_config

FP16 = {"dtype": "fp16", "initial_scale": 1024.0, "scale_window": 2}


def test_fp16_follows_fp32_and_its_scale_grows(pool, data, tmp_path):
    exact = pool.run(run_training, 1, tmp_path / "fp32", tiny_config(data))[0]
    half = pool.run(run_training, 2, tmp_path / "fp16", tiny_config(data, precision=FP16))[0]
    np.testing.assert_allclose(half["losses"], exact["losses"], rtol=5e-3)
    assert [line["loss_scale"] for line in half["lines"] if "loss" in line] == [1024, 2048, 2048, 4096, 4096]


def test_an_overflow_skips_the_step_on_all_ranks_and_lowers_the_scale(pool, data, tmp_path):
    huge = {**FP16, "initial_scale": 2.0**40, "hysteresis": 1}
    results = pool.run(run_training, 2, tmp_path, tiny_config(data, precision=huge))
    lines = [line for line in results[0]["lines"] if "loss" in line]
    assert [line["applied"] for line in lines] == [False] * 5
    assert [line["skipped"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss_scale"] for line in lines] == [2.0**power for power in (39, 38, 37, 36, 35)]
    for name, weight in results[0]["weights"].items():
        assert np.array_equal(weight, results[1]["weights"][name]), name


def test_scale_and_counters_survive_a_restart(pool, data, tmp_path):
    values = tiny_config(data, precision={**FP16, "initial_scale": 2.0**30, "scale_window": 1000})
    whole = pool.run(run_training, 1, tmp_path / "whole", values)[0]
    pool.run(
        run_training, 1, tmp_path / "parts", values | {"runtime": {**values["runtime"], "stop_after": 2}}
    )
    resumed = pool.run(run_training, 1, tmp_path / "parts", values)[0]
    for key in ("losses", "norms"):
        np.testing.assert_array_equal(resumed[key], whole[key])
    scales = [[line["loss_scale"] for line in run["lines"] if "loss" in line] for run in (whole, resumed)]
    assert scales[0] == scales[1]


def test_an_overflow_that_a_fixed_scale_cannot_cure_is_for_the_guard(pool, data, tmp_path):
    fixed = tiny_config(data, precision={"dtype": "fp16", "loss_scale": 2.0**40})
    with pytest.raises(AssertionError, match="step 1: loss or gradient norm is not finite"):
        pool.run(run_training, 1, tmp_path, fixed)


def test_gradients_may_travel_as_bf16(pool, data, tmp_path):
    exact = pool.run(run_training, 2, tmp_path / "fp32", tiny_config(data))[0]
    rounded = pool.run(
        run_training,
        2,
        tmp_path / "bf16",
        tiny_config(data, precision={"dtype": "fp32", "reduce_dtype": "bf16"}),
    )
    assert rounded[0]["losses"] != exact["losses"]
    np.testing.assert_allclose(rounded[0]["losses"], exact["losses"], rtol=2e-3)
    for name, weight in rounded[0]["weights"].items():
        assert np.array_equal(weight, rounded[1]["weights"][name]), name


def sent_bytes(run_dir, values):
    """Return the bytes of gradients that a rank hands to all-reduce in its last step."""
    sizes = []
    honest = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if tensor.numel() > 100:
            sizes.append(tensor.numel() * tensor.element_size())
        return honest(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        run_training(run_dir, values)
    finally:
        dist.all_reduce = honest
    return sum(sizes)


def test_bf16_on_the_wire_halves_the_bytes(pool, data, tmp_path):
    full = pool.run(sent_bytes, 2, tmp_path / "fp32", tiny_config(data))
    half = pool.run(
        sent_bytes,
        2,
        tmp_path / "bf16",
        tiny_config(data, precision={"dtype": "fp32", "reduce_dtype": "bf16"}),
    )
    assert [2 * size for size in half] == full


@pytest.mark.parametrize(
    ("name", "cuts"),  # torch fuses sgd where nothing is cut
    every(2, [("sgd", [{"zero": 3, "dp_shard": 2}]), ("sgd", [{}, {"tp": 2}]), ("muon", [{}])]),
)
def test_other_optimisers_learn_resume_and_do_not_care_for_the_layout(pool, data, tmp_path, name, cuts):
    values = tiny_config(data, optimizer={"name": name, "lr": {"sgd": 0.3, "muon": 0.01}[name]})
    whole = pool.run(run_training, 1, tmp_path / "one", values)[0]
    assert whole["losses"][-1] < whole["losses"][0] - 0.05
    for number, parallel in enumerate(cuts):
        two = pool.run(run_training, 2, tmp_path / f"two{number}", values | {"parallel": parallel})[0]
        np.testing.assert_allclose(two["losses"], whole["losses"], rtol={"sgd": 2e-6, "muon": 1e-3}[name])
    pool.run(
        run_training, 1, tmp_path / "parts", values | {"runtime": {**values["runtime"], "stop_after": 2}}
    )
    resumed = pool.run(run_training, 1, tmp_path / "parts", values)[0]
    assert resumed["losses"] == whole["losses"]
    for parameter, moments in whole["moments"].items():
        for key, moment in moments.items():
            assert np.array_equal(moment, resumed["moments"][parameter][key]), (parameter, key)


def test_muon_takes_the_published_step(model):
    """Momentum, Nesterov, five Newton-Schulz iterations, in float64 by hand."""
    settings = Optimizer(name="muon", lr=0.1, weight_decay=0.0, momentum=0.95)
    optimiser = build_optimiser(dict(model.named_parameters()), settings)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    weight = model.blocks["0"].mlp.up.weight
    before, gradient = weight.detach().double().clone(), weight.grad.double().clone()
    optimiser.step(0.1)
    momentum = 0.05 * gradient  # of zero and the gradient, as torch averages
    update = 0.05 * gradient + 0.95 * momentum
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.T if update.shape[0] > update.shape[1] else x
    expected = before - 0.1 * 0.2 * max(weight.shape) ** 0.5 * x
    error = (weight.detach().double() - expected).norm() / (before - expected).norm()
    assert error < 0.02  # torch iterates in bf16


def test_the_state_of_fp16_lies_in_the_checkpoint(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path, tiny_config(data, precision=FP16))
    state = json.loads((tmp_path / "checkpoints/step-00000005/state.json").read_text())
    assert state["scaler"] == {"scale": 4096.0, "forgiving": 2, "clean": 5}
    assert state["skipped"] == 0


def test_saving_before_the_first_step_was_taken_changes_nothing(pool, data, tmp_path):
    """The optimiser's state is made for the checkpoint; its step count must still start at 0."""
    late = {**FP16, "initial_scale": 2.0**26, "hysteresis": 1}
    whole = pool.run(
        run_training, 1, tmp_path / "whole", tiny_config(data, train={"steps": 8}, precision=late)
    )[0]
    applied = [line["applied"] for line in whole["lines"] if "applied" in line]
    assert applied[0] is False
    assert applied[-1] is True
    saved = tiny_config(data, train={"steps": 8}, precision=late, checkpoint={"every": 1})
    often = pool.run(run_training, 1, tmp_path / "often", saved)[0]
    assert often["losses"] == whole["losses"]
    assert float(often["moments"]["embed.weight"]["step"]) == sum(applied)
