"""Files of `torch.save` from strangers: read without running anything, or taking more memory than they have.

A file is inspected first, operation by operation: what it asks for must be on a list, and what it makes must
not grow by references to itself. Then torch's restricted reader makes tensors, containers and numbers; a few
named classes become inert objects.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shoal.errors import CheckpointError

_MAX_BYTES = 64 << 20  # of the structure, without its tensors
_MAX_OPERATIONS = 250_000  # a model of 1,000 tensors with its optimiser takes 100,000
_MAX_NODES = 10_000_000  # of the structure, written out without references
_LEGACY_PICKLES = 5  # magic number, protocol, machine, content, keys of the storages; see torch.serialization
_TORCH = re.compile(
    r"torch\.(\w+Storage|Size|device|[a-z]+\d+\w*|bool|half|float|double|short|int|long)"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|parameter|parameter_with_state)"
    r"|collections\.OrderedDict|_codecs\.encode"
)
_INERT = [
    f"{module}.{name}"
    for module, names in {
        "numpy.core.multiarray": ("_reconstruct", "scalar"),
        "numpy._core.multiarray": ("_reconstruct", "scalar"),
        "numpy": ("ndarray", "dtype"),
        "fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
        "argparse": ("Namespace",),
    }.items()
    for name in names
]
_CHANGING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}


class _Inert:
    """Takes the place of a class that a file may name and that nobody needs: it holds what it is given."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_pickle(path: Path) -> Any:
    """Read what `torch.save` wrote, running nothing: tensors (mapped from the file), containers, numbers.

    A CheckpointError names what else the file asked for, or says that it is damaged.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"  # as torch tells them apart
            file.seek(0)
            _inspect_zip(file, path) if is_zip else _inspect_legacy(file, path)
        with _inert():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a strange file makes the reader stumble over
        kind = type(error).__name__
        raise CheckpointError(f"{path} is not a file of torch.save, or it is damaged ({kind})") from error


@contextmanager
def _inert() -> Iterator[None]:
    """Let torch's restricted reader make inert objects, and nothing that another library allowed."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(_Inert, name) for name in _INERT])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def _inspect_zip(file: BinaryIO, path: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        structures = [entry for entry in entries if entry.filename.endswith(".pkl")]
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise CheckpointError(f"{path} is compressed, which torch.save never does")
        if len(structures) != 1:
            raise CheckpointError(f"{path} holds {len(structures)} structures, and torch.save writes one")
        if structures[0].file_size > _MAX_BYTES:
            raise CheckpointError(
                f"{path} has a structure of {structures[0].file_size >> 20} MiB, above {_MAX_BYTES >> 20}"
            )
        _inspect(io.BytesIO(archive.read(structures[0])), path)


def _inspect_legacy(file: BinaryIO, path: Path) -> None:
    """Inspect a file from before torch 1.6: pickles one behind the other, then the numbers."""
    head = io.BytesIO(file.read(_MAX_BYTES))
    for _ in range(_LEGACY_PICKLES):
        _inspect(head, path)


@dataclass
class _Made:
    """Something that a pickle makes: its size without references, and its text where it is one."""

    nodes: int
    text: str = ""


def _inspect(stream: BinaryIO, path: Path) -> None:
    """Follow one pickle without making what it makes; refuse what it may not ask for, and what would grow."""
    stack: list[_Made] = []
    marks: list[int] = []
    memo: dict[Any, _Made] = {}
    for count, (operation, argument, _) in enumerate(pickletools.genops(stream)):
        name, before = operation.name, operation.stack_before
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            taken = _take(stack, marks, before)
            if operation.stack_after:
                stack.append(_make(name, argument, taken, path))
                if stack[-1].nodes > _MAX_NODES:
                    raise CheckpointError(f"{path} grows without end by references to itself")
        if count > _MAX_OPERATIONS:
            raise CheckpointError(f"{path} has a structure of more than {_MAX_OPERATIONS:,} parts, the limit")


def _take(stack: list[_Made], marks: list[int], before: list[Any]) -> list[_Made]:
    """Take from the stack what an operation does: all above the last mark, or a fixed number."""
    has_mark = pickletools.markobject in before
    at = (marks.pop() - before.index(pickletools.markobject)) if has_mark else len(stack) - len(before)
    if at < 0:
        raise IndexError("an operation without its arguments")
    taken = stack[at:]
    del stack[at:]
    return taken


def _make(name: str, argument: Any, taken: list[_Made], path: Path) -> _Made:
    """Return what an operation leaves on the stack, made of what it took."""
    nodes = sum(made.nodes for made in taken)
    if name in _CHANGING:
        taken[0].nodes = nodes
        return taken[0]
    if name in ("GLOBAL", "INST", "STACK_GLOBAL"):
        asked = ".".join(made.text for made in taken) if name == "STACK_GLOBAL" else str(argument)
        asked = asked.replace(" ", ".")
        if not (_TORCH.fullmatch(asked) or asked in _INERT):
            raise CheckpointError(
                f"{path} asks for {asked[:100]}, which tensors, containers and numbers do not need",
                hint="do not load it with another program either, unless you know who made it",
            )
        return _Made(nodes + 1, asked)
    if name == "REDUCE" and taken[0].text == "_codecs.encode" and taken[1].text != "latin1":
        raise CheckpointError(f"{path} encodes text in a way that torch.save does not")
    if name.startswith("TUPLE") and taken:
        return _Made(nodes + 1, taken[-1].text)
    return _Made(nodes + 1, argument if isinstance(argument, str) else "")
