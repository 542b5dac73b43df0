"""Schedule, optimiser groups, guard, clock and rates, each by itself."""

import copy
import json
import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from shoal.config.load import load_config, preset_names, to_toml, validate
from shoal.config.sections import Config, Guard, Optimizer, Schedule
from shoal.errors import ConfigError, ShoalError
from shoal.parallel.norm import GradientNorm
from shoal.runtime.device import Device
from shoal.train.clock import Rates, StepClock
from shoal.train.guard import LossGuard
from shoal.train.optimiser import (
    WholeMuon,
    build_optimiser,
    clip_gradients,
    optimiser_tensors,
    unscale_gradients,
)
from shoal.train.request import refuse_other_run
from shoal.train.schedule import learning_rate
from tests.train.ranks import tiny_config

NONE = np.array([], dtype=np.int64)
CPU = Device(torch.device("cpu"), "gloo", "CPU")


def config(**sections):
    return validate(tiny_config("data", **sections), "test")


def rates(settings):
    return [learning_rate(settings, step) for step in range(1, settings.train.steps + 5)]


def test_schedule_warms_up_decays_and_stays_at_the_minimum():
    settings = config(
        train={"steps": 12}, schedule={"warmup_steps": 4, "min_lr": 1e-4}, optimizer={"lr": 1e-3}
    )
    got = rates(settings)
    assert got[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert got[7] == pytest.approx((1e-3 + 1e-4) / 2)
    assert got[11:] == [1e-4] * 5
    assert got[3:] == sorted(got[3:], reverse=True)


@pytest.mark.parametrize("kind", get_args(Schedule.model_fields["kind"].annotation))
def test_no_step_of_a_run_without_min_lr_has_a_rate_of_zero(kind):
    settings = Config.model_validate({"schedule": {"kind": kind}, "train": {"steps": 1000}})
    got = [learning_rate(settings, step) for step in range(1, 1001)]
    assert min(got) > 0
    if kind in ("cosine", "linear", "wsd"):
        assert got[-1] == pytest.approx(settings.optimizer.lr / 10)
        assert learning_rate(settings, 2000) == got[-1]


@pytest.mark.parametrize("preset", preset_names())
def test_no_step_of_a_preset_has_a_rate_of_zero(preset):
    settings = load_config(preset, {"train": {"steps": 100}, "data": {"datasets": ["data"]}})
    idle = [step for step in range(1, 101) if learning_rate(settings, step) <= 0]
    assert idle == ([1] if settings.schedule.kind.startswith("megatron") else [])  # whose rule begins at 0


def test_the_decay_horizon_may_differ_from_the_run():
    settings = config(train={"steps": 12}, schedule={"decay_steps": 6, "warmup_steps": 0, "min_lr": 1e-4})
    assert rates(settings)[5:] == [1e-4] * 11


class Whole:
    """A model in one process, as clipping sees it."""

    def __init__(self, model):
        self.updated_weights = lambda: dict(model.named_parameters())


def test_biases_and_norms_do_not_decay(model):
    groups = build_optimiser(dict(model.named_parameters()), Optimizer()).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    names = {name: decays[id(p)] for name, p in model.named_parameters()}
    assert names["embed.weight"] == names["blocks.0.mlp.up.weight"] == 0.1
    assert {names[n] for n in names if n.endswith("bias") or "norm" in n} == {0.0}
    assert len(decays) == len(names)


def test_clipping_scales_to_the_limit_and_returns_the_norm_before(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    exact = math.sqrt(sum(p.numel() for p in model.parameters()))
    norm = GradientNorm(dict(model.named_parameters()), is_partial=False)
    for limit, after in ((0.0, exact), (1.0, 1.0), (2.0, 1.0)):
        clip_gradients(Whole(model), math.sqrt(norm.squares()), limit)
        assert math.sqrt(norm.squares()) == pytest.approx(after, rel=1e-4)


def test_a_missing_gradient_is_named(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.norm.weight.grad = None
    with pytest.raises(ShoalError, match=r"1 of .* parameters got no gradient, norm.weight the first"):
        unscale_gradients(Whole(model), 1.0)


def test_optimiser_state_exists_before_the_first_step_and_changes_no_weight(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    keys = {"adamw": 3 * len(before), "sgd": len(before), "muon": 3 * len(before) - 2 * 12}
    for name, count in keys.items():
        named = dict(model.named_parameters())
        optimiser = build_optimiser(named, Optimizer(name=name))
        state = optimiser_tensors(named, optimiser)
        assert len(state) == count
        assert not any(tensor.any() for tensor in state.values())
        assert {group["weight_decay"] for group in optimiser.param_groups} == {0.0, 0.1}
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert "blocks.0.mlp.up.weight.momentum_buffer" in state
    assert "embed.weight.exp_avg" in state


def test_sgd_takes_the_steps_of_plain_sgd(model):
    """`weight_decay` is a penalty of matrices alone; torch's own loop over parameters is the reference."""
    plain = copy.deepcopy(model)
    groups = [{"params": [p], "weight_decay": 0.1 * (p.ndim >= 2)} for p in plain.parameters()]
    reference = torch.optim.SGD(groups, lr=0.2, momentum=0.9, foreach=False)
    optimiser = build_optimiser(dict(model.named_parameters()), Optimizer(name="sgd", momentum=0.9))
    assert all(group["fused"] for group in optimiser.param_groups)
    for _ in range(3):
        for left, right in zip(model.parameters(), plain.parameters(), strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        optimiser.step(0.2)
        reference.step()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_optimiser_state_is_made_with_one_gradient_at_a_time(model, monkeypatch):
    """All of them would be more than a rank that loads a checkpoint has to have."""
    named = dict(model.named_parameters())
    optimiser = build_optimiser(named, Optimizer())
    held, step = [], optimiser.step

    def note(rate):
        held.append(sum(p.grad is not None for p in named.values()))
        step(rate)

    monkeypatch.setattr(optimiser, "step", note)
    optimiser_tensors(named, optimiser)
    assert set(held) == {1}
    assert not any(p.grad is not None for p in named.values())


def guard(tmp_path, **settings):
    return LossGuard(Guard(**settings), tmp_path / "incidents.jsonl")


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan)])
@pytest.mark.parametrize(("action", "allowed"), [("warn", True), ("skip", False)])
def test_a_loss_that_is_not_finite_is_handled_as_set(tmp_path, loss, norm, action, allowed):
    judge = guard(tmp_path, nonfinite=action)
    assert judge.allows(7, loss, norm, np.array([1, 2])) is allowed
    incident = json.loads((tmp_path / "incidents.jsonl").read_text())
    assert (incident["step"], incident["action"], incident["samples"]) == (7, action, [1, 2])


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_leaves_the_running_mean_as_it_was(tmp_path, odd):
    judge = guard(tmp_path, nonfinite="warn", spike="skip", spike_factor=2.0)
    for step in range(1, 61):
        assert judge.allows(step, odd if step % 10 == 0 else 3.0, 1.0, NONE)
    assert (judge.mean, judge.seen) == (pytest.approx(3.0), 54)
    assert not judge.allows(61, 6.5, 1.0, NONE)  # it goes on judging
    assert judge.allows(62, 5.5, 1.0, NONE)


def test_stop_raises_and_says_what_to_do(tmp_path):
    with pytest.raises(ShoalError, match="step 7: loss or gradient norm is not finite") as caught:
        guard(tmp_path, nonfinite="stop").allows(7, math.nan, 1.0, NONE)
    assert "incidents.jsonl" in caught.value.hint


def test_a_spike_is_judged_against_the_running_mean(tmp_path):
    judge = guard(tmp_path, spike="skip", spike_factor=2.0)
    assert all(judge.allows(step, 3.0, 1.0, NONE) for step in range(1, 31))
    assert judge.mean == pytest.approx(3.0)
    assert judge.allows(31, 5.9, 1.0, NONE)
    assert not judge.allows(32, 6.5, 1.0, NONE)
    assert judge.mean < 3.2


def test_a_resumed_guard_judges_alike(tmp_path):
    first, second = guard(tmp_path), guard(tmp_path)
    for step in range(1, 31):
        first.allows(step, 3.0 + step / 100, 1.0, NONE)
    second.load(json.loads(json.dumps(first.state())))
    assert (second.mean, second.seen) == (first.mean, first.seen)


def test_rates_follow_from_a_known_clock():
    now = iter([100.0, 100.0, 100.5, 100.5, 102.0, 102.0])
    clock = StepClock(CPU, now=lambda: next(now))
    clock.begin()
    with clock.phase("forward"):
        pass
    with clock.phase("backward"):
        pass
    seconds, phases = clock.end().read()
    assert seconds == 2.0
    rates = Rates("tokens", 1000, world_size=2, flops_per_target=100, matmul_flops=1e6, peak_flops=5e5)
    rates.add(seconds, phases)
    rates.add(6.0, phases)
    got = rates.take()
    assert got["step_ms"] == 4000
    assert got["tokens_per_s"] == 250
    assert got["tokens_per_s_per_device"] == 125
    assert got["mfu"] == pytest.approx(125 * 100 / 5e5)
    assert got["mfu_measured"] == pytest.approx(125 * 100 / 1e6)
    assert (got["forward_ms"], got["backward_ms"], got["data_ms"]) == (500, 1500, 0)


def test_an_unknown_device_has_no_mfu():
    rates = Rates("tokens", 1000, world_size=1, flops_per_target=100, matmul_flops=1e6, peak_flops=None)
    rates.add(1.0, {})
    assert rates.take()["mfu"] is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0 - 0.9 / 8, 1.0 - 1.8 / 8]),
        ("constant", [0.5, 1.0, 1.0, 1.0]),
        ("inverse_sqrt", [0.5, 1.0, math.sqrt(2 / 3), math.sqrt(2 / 4)]),
        ("wsd", [0.5, 1.0, 1.0, 1.0]),
    ],
)
def test_each_kind_of_schedule_starts_as_it_should(kind, expected):
    settings = config(
        train={"steps": 10},
        optimizer={"lr": 1.0},
        schedule={"kind": kind, "warmup_steps": 2, "min_lr": 0.1, "wsd_decay_fraction": 0.5},
    )
    assert rates(settings)[:4] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "inverse_sqrt", "wsd"])
def test_no_schedule_falls_below_the_minimum_or_rises_again(kind):
    settings = config(
        train={"steps": 1000},
        optimizer={"lr": 1.0},
        schedule={
            "kind": kind,
            "warmup_steps": None,
            "warmup_fraction": 0.1,
            "min_lr": 0.4,
            "decay_steps": 500,
        },
    )
    got = [learning_rate(settings, step) for step in range(1, 2000)]
    assert got[49] == 1.0
    assert min(got[49:]) >= 0.4
    assert got[49:] == sorted(got[49:], reverse=True)
    if kind in ("cosine", "linear", "wsd"):
        assert got[499] == 0.4


def test_wsd_decays_linearly_in_its_last_part():
    settings = config(
        train={"steps": 100},
        optimizer={"lr": 1.0},
        schedule={"kind": "wsd", "warmup_steps": 0, "min_lr": 0.0},
    )
    got = rates(settings)
    assert got[79] == pytest.approx(1.0)
    assert got[89] == pytest.approx(0.5)
    assert got[99] == 0.0


def test_the_first_loss_is_the_running_mean(tmp_path):
    judge = guard(tmp_path)
    assert judge.state() == {"mean": 0.0, "seen": 0}
    assert judge.allows(1, 5.0, 1.0, NONE)
    assert judge.state() == {"mean": 5.0, "seen": 1}
    assert judge.allows(2, 3.0, 1.0, NONE)
    assert judge.state() == {"mean": 4.0, "seen": 2}


def test_settings_that_a_resume_honours_are_told_and_moved_data_is_none_of_them():
    values = tiny_config(Path("here"), optimizer={"lr": 1e-2})
    stored = to_toml(validate(values, "test"))
    moved = validate(tiny_config(Path("there"), optimizer={"lr": 2e-2}), "test")
    assert refuse_other_run(moved, stored, Path("step-1")) == [("optimizer.lr", 2e-2, 1e-2)]
    other = validate(tiny_config(Path("here"), train={"seed": 4}), "test")
    with pytest.raises(ConfigError, match=r"belongs to another run: train\.seed was 3, now 4"):
        refuse_other_run(other, stored, Path("step-1"))


@pytest.mark.parametrize("shape", [(24, 96), (96, 24), (32, 32)])
def test_muon_in_fp32_takes_the_steps_of_torch_s_within_the_rounding_of_bf16(shape):
    start, usual = torch.randn(shape), {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
    found = []
    for kind in (torch.optim.Muon, WholeMuon):
        torch.manual_seed(3)
        weight = torch.nn.Parameter(start.clone())
        optimiser = kind([weight], **usual, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            weight.grad = torch.randn(shape)
            kept = weight.grad.clone()
            optimiser.step()
            assert torch.equal(weight.grad, kept)
        found.append((weight.detach() - start, optimiser.state[weight]["momentum_buffer"]))
    (theirs, their_momentum), (ours, our_momentum) = found
    assert (ours - theirs).norm() < 0.02 * theirs.norm()
    assert torch.equal(our_momentum, their_momentum)


@pytest.mark.parametrize(("native", "kind"), [(True, torch.optim.Muon), (False, WholeMuon)])
def test_muon_is_in_fp32_where_bf16_is_slow(monkeypatch, native, kind):
    monkeypatch.setattr("shoal.train.optimiser.bf16_is_native", lambda device: native)
    named = {"blocks.0.up": torch.nn.Parameter(torch.randn(8, 4))}
    optimiser = build_optimiser(named, Optimizer(name="muon"))
    assert type(optimiser._parts[-1]) is kind
