"""What the networks of `shoal bench networks` are trained on: random samples, or those of a dataset.

Samples of a dataset are those of each step of `shoal train`: standardised, in its order, no two steps alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config.load import validate
from shoal.networks.description import Resolved, read
from shoal.networks.task import Classify, open_network
from shoal.tasks.feed import make_loader

SEED = 1234
_RANDOM_STEPS = 4  # whose random samples take turns
Arrays = tuple[NDArray[Any], NDArray[Any]]  # inputs [samples, ...], targets: a class, or one for each step


def open_task(network: str, data: Path, batch_size: int = 1) -> Classify[Any]:
    """Open a dataset for a network; an InputError where they do not go together."""
    train: dict[str, Any] = {"seed": SEED, "global_batch_size": batch_size, "micro_batch_size": batch_size}
    if tokens := read(network).tokens:
        train["seq_len"] = tokens
    values = {"model": {"network": network}, "data": {"datasets": [str(data)]}, "train": train}
    return open_network(validate(values, f"--data {data}"))


def resolve(network: str, data: Path | None) -> Resolved:
    """Return a network with the sizes of its data, by default its own."""
    return open_task(network, data).resolved if data else read(network).resolve()


def draw(network: str, data: Path | None, batch_size: int, steps: int) -> Arrays:
    """Return the samples of all steps, one after another; of four steps where they are random."""
    if data is None:
        return random_samples(read(network).resolve(), batch_size)
    task = open_task(network, data, batch_size)
    loader = make_loader(task.config, task.data.samples("train"), 0, 1, 1)
    inputs, targets = [], []
    for step in range(1, steps + 1):
        batch = loader.batch(step)
        micro = task.micro(*map(torch.from_numpy, task.arrays(batch.data, batch.samples)))
        inputs.append(micro.inputs.numpy().reshape(batch_size, *task.resolved.input))
        targets.append(micro.targets.numpy())
    dtype = np.int32 if task.resolved.is_tokens else np.float32
    return np.concatenate(inputs).astype(dtype), np.concatenate(targets)


def random_samples(resolved: Resolved, batch_size: int) -> Arrays:
    """Return random samples of a few steps."""
    rng, count = np.random.default_rng(SEED), batch_size * _RANDOM_STEPS
    if resolved.is_tokens:
        tokens = rng.integers(0, resolved.classes, (count, resolved.input[0] + 1), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:].astype(np.int64)
    inputs = rng.standard_normal((count, *resolved.input), dtype=np.float32)
    return inputs, rng.integers(0, resolved.classes, count)
