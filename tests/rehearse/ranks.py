"""Training as one rank after the other of a layout, each with a fake GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.config.layout import parse_layout, settings_of
from shoal.config.load import validate
from shoal.runtime.stop import Stop
from shoal.train.job import Job, build_job
from shoal.train.loop import train
from shoal.train.request import Request
from tests.rehearse.fake_cuda import CAPTURED, fake_rank
from tests.train.ranks import tiny_config

HOST = torch.device("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "model": {"n_heads": 4},
    "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 2, "compile": "off"},
    "eval": {"every": 2, "sequences": 3},
    "runtime": {"device": "cuda"},
}


def values_of(data: Path, layout: str, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a tiny configuration for a layout with some sections' fields replaced."""
    parallel = {**settings_of(parse_layout(layout)), **sections.pop("parallel", {})}
    merged = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {*SMALL, *sections}}
    return tiny_config(data, **merged, parallel=parallel)


def rehearse(run_dir: Path, values: dict[str, Any], world_size: int = 1) -> list[Job]:
    """Train as the first and the last rank of a world, from the first step to the last checkpoint.

    These differ in all that ranks differ in: part of the pipeline, columns, shards, rows of the batch.
    """
    jobs = []
    for rank in sorted({0, world_size - 1}):
        folder = run_dir / str(rank)
        folder.mkdir(parents=True)
        with fake_rank(rank, world_size) as process:
            config = validate(values, "test")
            job = build_job(
                Request(config, folder), process, Stop(process, folder, config.runtime, launched=False)
            )
            assert train(job)
            assert job.saved_step == config.train.steps
            assert expected_graphs(job) <= CAPTURED
            jobs.append(job)
    return jobs


def expected_graphs(job: Job) -> set[str]:
    """Return operators of the graphs that a job must have had compiled for its GPU."""
    blocks = {"scaled_dot_product_attention"} if job.compilation.on else set()
    has_loss = job.compilation.loss and any(part.head is not None for part in job.model.decoders)
    return blocks | ({"logsumexp"} if has_loss else set())


def devices_of(job: Job) -> dict[str, set[torch.device]]:
    """Return where weights, gradients and the optimiser's state of a job lie."""
    weights = job.model.updated_weights()
    states = [job.optimiser.state_of(weight) for weight in weights.values()]
    return {
        "weights": {_device(weight) for weight in weights.values()},
        "gradients": {_device(weight.grad) for weight in weights.values()},
        "state": {_device(value) for state in states for value in state.values() if value.ndim},
    }


def on(device: torch.device) -> dict[str, set[torch.device]]:
    """Return what `devices_of` returns where all lies on one device."""
    return {what: {device} for what in ("weights", "gradients", "state")}


def _device(tensor: Tensor) -> torch.device:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).device
