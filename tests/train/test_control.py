"""What a step waits for beside its exchanges: one message between ranks, one look at device values."""

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shoal.config.layout import parse_layout, settings_of
from shoal.train.loop import train
from shoal.train.metrics import read_metrics
from tests.cases import every
from tests.train.ranks import make_job, tiny_config

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
MESSAGES = ("all_reduce", "all_gather", "broadcast", "all_gather_object", "broadcast_object_list", "barrier")


def waits_of(run_dir, values, steps):
    """Train; return the steps of messages over the control group, of those over the device, and of reads."""
    job = make_job(run_dir, values | {"train": values["train"] | {"steps": steps}})
    control, world, reads, batch, now = [], [], [], job.task.batch, 0

    def next_batch(step):
        nonlocal now
        now = step
        return batch(step)

    def counted(name):
        honest = getattr(dist, name)

        def call(*args, **kwargs):
            if kwargs.get("group") is job.process.control:
                control.append(now)
            elif args and getattr(args[0], "dtype", None) == torch.float64:  # no gradient
                world.append(now)
            return honest(*args, **kwargs)

        return call

    def noted(name):
        honest = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            caller = Path(sys._getframe(1).f_code.co_filename)
            # On the host: process.py reads what came in a message, pipeline.py the index of a micro-batch.
            read_by = f"{caller.name}: {name}"
            if "shoal" in caller.parts and caller.name != "process.py" and read_by != "pipeline.py: __int__":
                reads.append(now)
            return honest(tensor, *args, **kwargs)

        return read

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(job.task, "batch", next_batch))
        for name in MESSAGES:
            patches.enter_context(mock.patch.object(dist, name, counted(name)))
        for name in READS:
            patches.enter_context(mock.patch.object(torch.Tensor, name, noted(name)))
        assert train(job)
    return control, world, reads


def waits_per_step(pool, data, tmp_path, **sections):
    """Return for each rank the messages, of both kinds, and the reads of five steps that are no log steps."""
    values = tiny_config(
        data, train={"log_every": 1000}, eval={"every": 0}, checkpoint={"every": 0}, **sections
    )
    ranks = pool.run(waits_of, 2, tmp_path, values, 8)
    return [tuple(sum(2 < step < 8 for step in steps) for steps in found) for found in ranks]


@pytest.mark.parametrize(
    ("words", "guard"),
    every(
        2,
        [
            ("zero2x2", {}),
            ("dp2", {}),
            ("pp2", {}),
            ("tp2", {}),
            ("dp2", {"late": True}),
            ("pp2", {"late": True}),
        ],
    ),
)
def test_a_step_has_one_message_between_ranks_and_one_look_at_device_values(
    pool, data, tmp_path, words, guard
):
    parallel = settings_of(parse_layout(words))
    found = waits_per_step(pool, data, tmp_path, parallel=parallel, guard=guard)
    assert found == [(5, 5 if guard else 0, 5)] * 2, "late, the device adds up loss and norm"


@pytest.mark.parametrize(("late", "expected"), [(False, [2, 3, 4, 5, 6, 7]), (True, [3, 4, 5, 6, 7])])
def test_a_late_guard_looks_at_a_step_while_the_next_one_runs(pool, data, tmp_path, late, expected):
    values = tiny_config(
        data, train={"log_every": 1000}, eval={"every": 0}, checkpoint={"every": 0}, guard={"late": late}
    )
    for *_, reads in pool.run(waits_of, 2, tmp_path, values, 8):
        assert [step for step in reads if 1 < step < 8] == expected  # the first and the last are log steps


def test_a_guard_that_checks_nothing_needs_no_look_between_log_steps(pool, data, tmp_path):
    values = tiny_config(
        data,
        train={"log_every": 4},
        eval={"every": 0},
        checkpoint={"every": 0},
        guard={"late": True, "nonfinite": "warn", "spike_factor": 0.0},
    )
    for *_, reads in pool.run(waits_of, 2, tmp_path, values, 9):
        assert [step for step in reads if 0 < step < 9] == [1, 4, 4, 4, 8, 8, 8, 8]


def lines_with_figures(run_dir, values):
    job = make_job(run_dir, values)
    job.replicas.figures = {"staleness": 2}  # as a strategy leaves it after an exchange
    train(job)
    return [line for line in read_metrics(run_dir / "metrics.jsonl") if "grad_norm" in line]


def test_what_a_strategy_tells_of_a_step_stands_in_its_record(pool, data, tmp_path):
    (lines,) = pool.run(lines_with_figures, 1, tmp_path, tiny_config(data))
    assert [line["staleness"] for line in lines] == [2] * 5
