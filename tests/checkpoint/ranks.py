"""What the checkpoint tests do on each rank: build tensors whose values say what they are, open a store."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.checkpoint.store import CheckpointStore

SHAPES = {
    "model.embed.weight": (10, 4),
    "model.up.weight": (7, 3),
    "optimizer.up.weight.exp_avg": (7, 3),
    "optimizer.up.weight.step": (),
}


def full_tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    """Return whole tensors that depend on their name and on `value`."""
    return {
        name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * index + value
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def cut_tensors(value: float = 0.0, *, dim: int = 0) -> dict[str, torch.Tensor]:
    """Return the same tensors as DTensors over all ranks; scalars replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(dim) if tensor.dim() else Replicate()])
        for name, tensor in full_tensors(value).items()
    }


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return plain whole tensors."""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Say whether two dicts hold bit-equal tensors."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def open_store(folder: Path, **retention) -> CheckpointStore:
    """Open a store over a group of its own."""
    return CheckpointStore(folder, group=dist.new_group(backend="gloo"), **retention)


def save_steps(folder: Path, steps: list[int], cut: bool = False, **retention) -> None:
    """Save a few steps whose tensors hold the step's number."""
    store = open_store(folder, **retention)
    for step in steps:
        tensors = cut_tensors(step) if cut else full_tensors(step)
        store.save(step, tensors, {"step": step, "loss": 0.1 * step}, {"config.toml": b"seed = 1\n"})
    store.wait()


def load_latest(folder: Path, cut: bool = False, dim: int = 0) -> int | None:
    """Load the newest checkpoint, check each value, and return its step."""
    store = open_store(folder)
    path = store.latest()
    if path is None:
        return None
    step = int(path.name.removeprefix("step-"))
    tensors = cut_tensors(-1, dim=dim) if cut else full_tensors(-1)
    store.load(path, tensors)
    assert same(whole(tensors), full_tensors(step))
    return step
