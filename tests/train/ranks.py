"""Training in the warm workers of the pool: the real job and loop, without the launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shoal.config.load import validate
from shoal.errors import ShoalError
from shoal.runtime.device import select_device
from shoal.runtime.process import Process, form_groups
from shoal.runtime.rank_info import RankInfo, ReplicaGroupInfo
from shoal.runtime.stop import Stop
from shoal.train.job import Job, build_job
from shoal.train.loop import train
from shoal.train.metrics import read_metrics
from shoal.train.request import Request
from shoal.train.step import StepResult, agree, forward_backward

TINY: dict[str, dict[str, Any]] = {
    "model": {"n_layers": 2, "d_model": 32, "n_heads": 2, "max_seq_len": 16},
    "train": {"steps": 5, "global_batch_size": 16, "micro_batch_size": 4, "seq_len": 16, "seed": 3},
    "optimizer": {"lr": 1e-2},
    "schedule": {"warmup_steps": 2, "min_lr": 1e-3},
    "precision": {"dtype": "fp32"},
    "eval": {"every": 0, "sequences": 4},
    "checkpoint": {"every": 0},
    "runtime": {"device": "cpu", "threads": 1, "timeout_s": 60},
}


def tiny_config(data: Path, /, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the raw values of a tiny configuration with some sections' fields replaced."""
    values = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}
    return values | {"data": {"datasets": [str(data)], **sections.get("data", {})}}


def make_job(
    run_dir: Path,
    values: dict[str, Any],
    *,
    init: Path | None = None,
    init_optimizer: bool = False,
    group: ReplicaGroupInfo | None = None,
) -> Job:
    """Build the job of this pool worker. Collective over the world."""
    config = validate(values, "test")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = select_device("cpu", rank, world_size)
    process: Process = form_groups(RankInfo(rank, world_size, rank, world_size), device, config.runtime)
    run_dir.mkdir(parents=True, exist_ok=True)
    stop = Stop(process, run_dir, config.runtime, launched=False)
    return build_job(Request(config, run_dir, init, init_optimizer, replica_group=group), process, stop)


def result_of(job: Any, step: int) -> StepResult:
    """Go through a step up to its update."""
    batch = job.task.batch(step)
    return agree(job, batch, forward_backward(job, batch))


def run_training(
    run_dir: Path, values: dict[str, Any], draws: bool = False, **options: Any
) -> dict[str, Any]:
    """Train to the end or to stop_after; return each step's loss and norm, and the final weights by name.

    The picture of the curve is only drawn if asked for.
    """
    job = make_job(run_dir, values, **options)
    with mock.patch.dict(os.environ, {"CURVES": ""} if draws else {}):
        done = train(job)
    lines = read_metrics(run_dir / "metrics.jsonl") if job.process.rank == 0 else []
    steps = [line for line in lines if "loss" in line]
    return {
        "done": done,
        "steps": [line["step"] for line in steps],
        "losses": [line["loss"] for line in steps],
        "norms": [line["grad_norm"] for line in steps],
        "lines": lines,
        "weights": {name: whole(p.detach()) for name, p in job.model.named_weights().items()},
        "moments": {
            name: {key: whole(value) for key, value in job.optimiser.state_of(p).items()}
            for name, p in job.model.named_weights().items()
        },
    }


def run_poisoned(run_dir: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Train with a loss that is NaN on rank 1 alone in step 3."""
    from shoal.tasks.gpt import Gpt

    honest = Gpt.forward_loss

    def run(self, model, micro, inputs=None):
        value = honest(self, model, micro, inputs)
        poisoned = dist.get_rank() == 1 and self.poisoned_step == 3
        return value * float("nan") if poisoned else value

    batch = Gpt.batch

    def note_step(self, step):
        self.poisoned_step = step
        return batch(self, step)

    Gpt.forward_loss, Gpt.batch = run, note_step
    try:
        return run_training(run_dir, values)
    finally:
        Gpt.forward_loss, Gpt.batch = honest, batch


def refusal_of_poisoned(run_dir: Path, values: dict[str, Any]) -> str:
    """Return with what `run_poisoned` ends on this rank."""
    with pytest.raises(ShoalError) as caught:
        run_poisoned(run_dir, values)
    return str(caught.value)


def run_replica_group(run_dir: Path, values: dict[str, Any], replicas: int, port: int, mark: str) -> Any:
    """Train as a rank of one of the replicas that share this pool's workers and meet in a store."""
    size = dist.get_world_size() // replicas
    replica, rank = divmod(dist.get_rank(), size)
    group = ReplicaGroupInfo(replica, replicas, size, "127.0.0.1", port, f"{mark}-{replica}", 0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"here{dist.get_rank()}", "")
    store.wait([f"here{other}" for other in range(dist.get_world_size())])  # nobody connects any more
    dist.destroy_process_group()
    store = dist.PrefixStore(f"world-{mark}-{replica}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return run_training(group.folder(run_dir), values, group=group)


def whole(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor, put together where it is cut. Collective over its mesh."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.numpy().copy()


def batch_samples(run_dir: Path, values: dict[str, Any], step: int) -> tuple[list[int], torch.Tensor]:
    """Return this rank's samples and tokens of a step."""
    batch = make_job(run_dir, values).task.batch(step)
    return batch.samples.tolist(), batch.data[0]


def equal(left, right):
    assert left["losses"] == right["losses"]
    assert left["norms"] == right["norms"]
    for name, weight in left["weights"].items():
        assert np.array_equal(weight, right["weights"][name]), name
        for key, moment in left["moments"][name].items():
            assert np.array_equal(moment, right["moments"][name][key]), (name, key)
