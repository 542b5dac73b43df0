"""What the checkpoint tests do on each rank: build tensors whose values say what they are, open a store."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.checkpoint import store as store_module
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.tensors import HostCopies
from shoal.errors import CheckpointError

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


def load_from(folder: Path, name: str) -> None:
    """Load one checkpoint by name."""
    open_store(folder).load(folder / name, full_tensors(-1))


def failing_save(folder: Path, failing_rank: int) -> tuple[str, str]:
    """Save step 10, then step 20 with a full disk on one rank; return what that raised, twice over."""
    store = open_store(folder)
    store.save(10, full_tensors(10), {}, {})
    store.wait()
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.fsync", side_effect=full if dist.get_rank() == failing_rank else None):
        store.save(20, full_tensors(20), {}, {})
        raised = []
        for again in (store.wait, store.poll):
            try:
                again()
            except CheckpointError as error:
                raised.append(str(error))
    return raised[0], raised[1]


def save_on_small_disk(folder: Path) -> str:
    """Save a small step, then one that does not fit; return what that raised."""
    store = open_store(folder)
    store.save(10, full_tensors(10), {}, {})
    store.save(20, {"model.big": torch.zeros(1 << 20)}, {}, {})
    try:
        store.wait()
    except CheckpointError as error:
        return str(error)
    return ""


def damage_then_latest(folder: Path, damaged: list[str]) -> list[str | None]:
    """Cut one file of each named checkpoint short, then ask twice for the newest good one."""
    store = open_store(folder)
    if dist.get_rank() == 0:
        for name in damaged:
            (folder / name / "state.json").write_text("{")
    dist.barrier()
    paths = [store.latest(), store.latest()]
    return [path and path.name for path in paths]


def load_misfit(folder: Path) -> str:
    """Ask for a tensor of another shape, one that is not there, and leave one out."""
    store = open_store(folder)
    path = store.latest()
    tensors = full_tensors() | {"model.new": torch.zeros(1), "model.up.weight": torch.zeros(7, 4)}
    del tensors["model.embed.weight"]
    try:
        store.load(path, tensors)
    except CheckpointError as error:
        return str(error)
    return ""


def save_twice_quickly(folder: Path) -> tuple[bool, bool, list[str]]:
    """Hold the first save up until the second is due; return what was seen."""
    store = open_store(folder)
    gate = threading.Event()
    write_folder = store_module.write_folder

    def slow(*args):
        gate.wait(20)
        write_folder(*args)

    messages: list[str] = []
    with (
        mock.patch.object(store_module, "write_folder", slow),
        mock.patch.object(store_module.log, "info", lambda text, *args: messages.append(text % args)),
    ):
        tensors = full_tensors(10)
        held_up_s = store.save(10, tensors, {}, {})
        for tensor in tensors.values():
            tensor.fill_(-1)  # training goes on: the copy must not see it
        returned_early = not (folder / "step-00000010").exists() and held_up_s < 10
        threading.Timer(0.5, gate.set).start()
        waited = store.save(20, full_tensors(20), {}, {}) > 0.4
        store.wait()
    target = full_tensors()
    store.load(folder / "step-00000010", target)
    assert same(target, full_tensors(10))
    return returned_early, waited, messages


def save_where_a_gpu_is_seen(folder: Path) -> bool:
    """Save with torch told of a GPU; say whether DCP left its loader for tensors on GPUs alone."""
    loader = "torch.distributed.checkpoint.filesystem._OverlappingCpuLoader"
    with mock.patch("torch.cuda.is_available", return_value=True), mock.patch(loader) as overlapping:
        overlapping.side_effect = RuntimeError("there is no GPU to copy over")
        save_steps(folder, [3])
        assert load_latest(folder) == 3
    return not overlapping.called


def buffers_of_two_saves() -> bool:
    """Say whether host copies of equal tensors are in the same memory each time."""
    copies = HostCopies()
    first = {name: tensor.data_ptr() for name, tensor in copies.copy(full_tensors(1)).items()}
    second = copies.copy(full_tensors(2))
    assert same(second, full_tensors(2))
    return first == {name: tensor.data_ptr() for name, tensor in second.items()}
