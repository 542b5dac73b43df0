"""Steps that the guard leaves out: what it knows and the learning rate that is applied, across a resume."""

import json
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.train import loop
from tests.cases import every
from tests.train.ranks import run_training, tiny_config

SPIKE, PEAK, LOW, WARMUP = 9.0, 1e-2, 1e-3, 2


def train_with_losses(run_dir, values, losses):
    """Train as if the loss were 3 but in some steps; add the rates that optimisers had in each step."""
    step, rates = None, {}

    def agree(job, batch, total, honest=loop.agree):
        return replace(honest(job, batch, total), loss=losses.get(batch.step, 3.0))

    def update(job, result, honest=loop.update):
        nonlocal step
        step = result.step
        applied = honest(job, result)
        step = None
        return applied

    def note(optimiser, args, named):
        if step is not None:  # else the optimiser's state is made, by steps of rate 0
            rates.setdefault(step, set()).update(group["lr"] for group in optimiser.param_groups)

    hook = register_optimizer_step_pre_hook(note)
    with mock.patch.multiple(loop, agree=agree, update=update):
        result = run_training(run_dir, values)
    hook.remove()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rates)
    steps = [line for line in result["lines"] if "applied" in line]
    return result | {"lines": steps, "rates": everyone}


def in_parts(pool, world_size, run_dir, values, losses, stops):
    """Train and stop after some steps; return what each start gave."""
    found = []
    for stop_after in (*stops, 0):
        part = values | {"runtime": {**values["runtime"], "stop_after": stop_after}}
        found.append(pool.run(train_with_losses, world_size, run_dir, part, losses)[0])
    return found


def state_of(run_dir, step):
    return json.loads((run_dir / f"checkpoints/step-{step:08d}/state.json").read_text())


def test_a_resumed_run_judges_and_counts_as_if_it_had_not_stopped(pool, data, tmp_path):
    values = tiny_config(data, train={"steps": 30}, guard={"nonfinite": "skip", "spike": "skip"})
    losses = {3: math.nan, 10: 4.0, 24: 5.0, 27: SPIKE}  # with a mean of 3, only the last is a spike
    [whole] = in_parts(pool, 1, tmp_path / "whole", values, losses, [])
    *_, resumed = in_parts(pool, 1, tmp_path / "parts", values, losses, [4, 25])
    applied = {line["step"]: line["applied"] for line in resumed["lines"]}
    assert [step for step, taken in applied.items() if not taken] == [3, 27]
    assert [line["skipped"] for line in resumed["lines"]] == [0] * 2 + [1] * 24 + [2] * 4
    first, second = (state_of(tmp_path / name, 30) for name in ("whole", "parts"))
    assert first["guard"] == second["guard"]
    assert second["guard"]["seen"] == 28
    assert first["skipped"] == second["skipped"] == 2
    assert applied == {line["step"]: line["applied"] for line in whole["lines"]}


def cosine(step, left_out):
    del left_out  # this kind goes by the number of the step
    if step <= WARMUP:
        return PEAK * step / WARMUP
    return LOW + (PEAK - LOW) * (1 + math.cos(math.pi * (step - WARMUP) / (10 - WARMUP))) / 2


def megatron(step, left_out):
    taken = step - 1 - left_out
    return PEAK * taken / WARMUP if taken <= WARMUP else PEAK * (10 - (taken - WARMUP)) / 10


@pytest.mark.parametrize(
    ("kind", "rate", "world_size", "sections"),
    every(
        2,
        [
            ("cosine", cosine, 1, {}),
            ("megatron_linear", megatron, 1, {}),
            ("megatron_linear", megatron, 1, {"optimizer": {"name": "muon", "lr": PEAK}}),
            ("cosine", cosine, 2, {"sync": {"strategy": "central_parallel"}}),
            ("megatron_linear", megatron, 2, {"parallel": {"zero": 2}}),
        ],
    ),
    ids=["adamw", "adamw-left-out", "muon", "owners", "zero"],
)
def test_the_rate_of_the_schedule_is_the_one_that_is_applied(
    pool, data, tmp_path, kind, rate, world_size, sections
):
    schedule = {"kind": kind, "warmup_steps": WARMUP, "min_lr": LOW}
    guard = {"nonfinite": "skip", "spike": "warn"}
    values = tiny_config(data, train={"steps": 10}, schedule=schedule, guard=guard, **sections)
    parts = in_parts(pool, world_size, tmp_path, values, {4: math.nan, 7: math.inf}, [5])
    expected = {
        step: pytest.approx(rate(step, (step > 4) + (step > 7)), rel=1e-12)
        for step in range(1, 11)
        if step not in (4, 7)
    }
    for rank in range(world_size):
        applied = {step: found for part in parts for step, found in part["rates"][rank].items()}
        assert all(len(found) == 1 for found in applied.values()), applied
        assert {step: found for step, (found,) in applied.items()} == expected
    assert {line["step"]: line["lr"] for line in parts[-1]["lines"] if line["applied"]} == expected
