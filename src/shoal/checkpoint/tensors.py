"""Tensors to and from safetensors: torch.distributed.checkpoint with its Hugging Face storage, no pickle.

A flat dict maps names to plain tensors (equal on all ranks that hold them) or DTensors. A name begins with
its sub-folder: `model.blocks.0.up.weight` is the tensor `blocks.0.up.weight` in the files of `model/`.
"""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from shoal.checkpoint.manifest import WEIGHTS, resolve_checkpoint
from shoal.errors import CheckpointError, UnreadableError
from shoal.runtime.files import reading

T = TypeVar("T")
Tensors = dict[str, Tensor]
# The serialiser builds a file in memory and holds the interpreter lock meanwhile: about 0.1 s for this much.
FILE_BYTES = 64 << 20


class HostCopies:
    """Copies of tensors in host memory that are used again for every save."""

    def __init__(self) -> None:
        self._buffers: Tensors = {}

    def copy(self, tensors: Tensors) -> Tensors:
        """Return `tensors` as they are now, on the host; valid until the next call."""
        copies = {name: self._copy(name, tensor.detach()) for name, tensor in tensors.items()}
        self._buffers = {name: self._buffers[name] for name in tensors}
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        return _like_dtensor(buffer, tensor) if isinstance(tensor, DTensor) else buffer


def _like_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor cut like `like` around a host tensor; DTensor.from_local would move it to the device.

    Private API, seen on torch 2.11 to 2.13.
    """
    return DTensor(local, like._spec, requires_grad=False)


def sizes_of(tensors: Tensors) -> dict[str, tuple[int, bool]]:
    """Return name -> (bytes of the whole tensor, whether it is a DTensor)."""
    return {name: (tensor.nbytes, isinstance(tensor, DTensor)) for name, tensor in tensors.items()}


def share_out(held: list[dict[str, tuple[int, bool]]]) -> list[set[str]]:
    """Return the names that each rank has to copy and write, from what each rank holds.

    A DTensor is everybody's; a plain tensor goes to one rank that holds it, so that all have about as much.
    """
    load = [0] * len(held)
    shares = [{name for name, (_, is_cut) in part.items() if is_cut} for part in held]
    plain = {name: size for part in held for name, (size, is_cut) in part.items() if not is_cut}
    for name, size in sorted(plain.items(), key=lambda item: (-item[1], item[0])):
        owner = min((rank for rank, part in enumerate(held) if name in part), key=lambda rank: load[rank])
        load[owner] += size
        shares[owner].add(name)
    return shares


def folders_of(named: dict[str, T]) -> dict[str, dict[str, T]]:
    """Group by sub-folder what a flat dict holds, under names without the folder's word."""
    groups: dict[str, dict[str, T]] = {}
    for name, value in named.items():
        folder, _, rest = name.partition(".")
        groups.setdefault(folder, {})[rest] = value
    return groups


def write_folder(path: Path, tensors: Tensors, sizes: dict[str, int], group: dist.ProcessGroup) -> None:
    """Write each rank's part of one sub-folder's tensors, fsynced. Collective over `group`.

    `sizes` names the tensors of all ranks, with their bytes; it is the same on every rank. Raises only on the
    ranks where something failed: the caller agrees.
    """
    numbers = _file_numbers(sizes, FILE_BYTES * dist.get_world_size(group))
    writer = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=numbers, save_distributed=True)
    # Or, where there is a GPU, it copies once more, in the default stream of GPU 0: these are host tensors.
    writer.per_thread_copy_ahead = 0
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _dcp(dcp.save, tensors, group, storage_writer=writer, planner=planner)


def _file_numbers(sizes: dict[str, int], limit_bytes: int) -> dict[str, int]:
    """Return name -> number of its file, from 1; a file is closed before it outgrows the limit."""
    numbers, number, filled = {}, 1, 0
    for name, size in sizes.items():
        if filled and filled + size > limit_bytes:
            number, filled = number + 1, 0
        filled += size
        numbers[name] = number
    return numbers


def read_folder(path: Path, tensors: Tensors, group: dist.ProcessGroup | None) -> None:
    """Fill `tensors` in place with a rank's parts of one sub-folder's tensors, cut anew.

    Collective over `group`; None reads without a process group. Names and shapes must fit (`mismatches`).
    Raises only on the ranks where something failed: the caller agrees.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with reading(path):
        _dcp(dcp.load, tensors, group, storage_reader=HuggingFaceStorageReader(str(path)), planner=planner)


def _dcp(
    action: Callable[..., Any], tensors: Tensors, group: dist.ProcessGroup | None, **options: Any
) -> None:
    """Run a DCP call; raise this rank's own error in place of DCP's BaseException about any rank's."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            action(tensors, process_group=group, no_dist=group is None, **options)
    except CheckpointException as error:
        rank = 0 if group is None else dist.get_rank(group)
        if rank in error.failures:
            cause = error.failures[rank][0]
            raise (
                cause if isinstance(cause, Exception) else CheckpointError(f"stopped by {cause!r}")
            ) from error


def write_file(path: Path, tensors: Tensors) -> None:
    """Write whole tensors as one safetensors file; an OSError says what the disk said."""
    try:
        path.touch()
        mode = path.stat().st_mode  # by the umask; safetensors makes files for their owner alone
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
    except SafetensorError as error:  # holds the system's words, and no number
        full = "No space left" in str(error) or "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


def saved_shapes(path: Path, folder_names: Iterable[str]) -> dict[str, torch.Size]:
    """Return name -> whole shape of the tensors in some folders; a hole in one is a CheckpointError."""
    shapes = {}
    for folder in folder_names:
        if not (path / folder).is_dir():
            raise CheckpointError(
                f"{path} holds no {folder} tensors", hint="`shoal checkpoint ls` says what each one holds"
            )
        try:
            with reading(path / folder):
                metadata = HuggingFaceStorageReader(str(path / folder)).read_metadata()
        except UnreadableError:
            raise
        except Exception as error:  # whatever a strange file makes the reader stumble over
            raise CheckpointError(f"the tensors in {path / folder} cannot be read: {error!r}") from error
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)  # safetensors hold nothing else
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise CheckpointError(f"tensor {folder}.{name} in {path} is incomplete or doubled")
            shapes[f"{folder}.{name}"] = entry.size
    return shapes


def mismatches(saved: dict[str, torch.Size], wanted: dict[str, torch.Size]) -> list[str]:
    """Return one sentence for each name or shape in which a request differs from the files."""
    problems = [f"{name} is not in the checkpoint" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"{name} is in the checkpoint only" for name in sorted(saved.keys() - wanted.keys())]
    for name in sorted(saved.keys() & wanted.keys()):
        if saved[name] != wanted[name]:
            problems.append(f"{name} is {list(saved[name])} in the checkpoint, {list(wanted[name])} wanted")
    return problems


def refuse_mismatches(path: Path, problems: list[str]) -> None:
    """Raise a CheckpointError that names the first tensors that do not fit."""
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(
            f"checkpoint {path} does not fit this model: {'; '.join(problems[:5])}{more}",
            hint="use the config.toml that lies in the checkpoint",
        )


def model_tensors(model: nn.Module) -> Tensors:
    """Return a model's parameters and saved buffers as `model.<name>`; a tied tensor under its first name."""
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {f"{WEIGHTS}.{name}": state[name] for name in first.values()}


def load_weights(path: Path, model: nn.Module, group: dist.ProcessGroup | None = None) -> Path:
    """Fill a whole model, or this rank's part of one that is cut over `group`; return the checkpoint read.

    `path` is a run folder, a checkpoints folder or a checkpoint; the files are verified first. Collective
    over `group`; with none it works without a process group.
    """
    checkpoint = resolve_checkpoint(path)
    tensors = model_tensors(model)
    wanted = {name: tensor.shape for name, tensor in tensors.items()}
    refuse_mismatches(checkpoint, mismatches(saved_shapes(checkpoint, [WEIGHTS]), wanted))
    read_folder(checkpoint / WEIGHTS, folders_of(tensors)[WEIGHTS], group)
    return checkpoint
