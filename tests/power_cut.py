"""A disk that loses power: what a process changed is recorded, and played again up to any moment.

The disk that is played keeps no promise beyond these: what a file held when it was fsynced stays, a change
to a folder's entries stays once that folder was fsynced, and a rename is done or not done. Of all other
changes any part may have arrived, in any order.
"""

from __future__ import annotations

import os
import random
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from shoal.worker_pool import process_context
from tests.pool import PRELOADED

Event = tuple[str, Path, Any]
_WHERE = {
    "os.mkdir": 2,
    "os.remove": 1,
    "os.rmdir": 1,
}  # where the audited arguments hold the folder's handle


def record(root: Path, work: Callable[..., None], *args: Any) -> list[Event]:
    """Run `work(mark, *args)` in a process of its own; return what it changed below `root`, in order.

    `mark(value)` puts an event of the kind "mark" between the others.
    """
    context = process_context(PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_record, args=(theirs, root, work, args))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join(60)
        assert process.exitcode == 0, process.exitcode


def _record(pipe: Any, root: Path, work: Callable[..., None], args: tuple) -> None:
    events: list[Event] = []
    resting = True

    def full(path: Any, handle: int = -1) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{handle}") if handle >= 0 else os.getcwd(), os.fsdecode(path))

    def note(kind: str, path: Path, more: Any = None) -> None:
        if path.is_relative_to(root):
            events.append((kind, path, more))

    def hook(name: str, args: tuple) -> None:
        if resting:
            return
        if name == "open" and isinstance(args[2], int) and not isinstance(args[0], int):
            if args[2] & (os.O_WRONLY | os.O_RDWR):
                note("write", full(args[0]))
        elif name in ("os.rename", "os.link"):
            note(name, full(args[0], args[2]), full(args[1], args[3]))
        elif name in _WHERE:
            note(name, full(args[0], args[_WHERE[name]]))

    honest = os.fsync

    def sync(handle: Any) -> None:
        honest(handle)
        number = handle if isinstance(handle, int) else handle.fileno()
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        note("sync", path, path.read_bytes() if stat.S_ISREG(os.fstat(number).st_mode) else None)

    sys.addaudithook(hook)
    with mock.patch("os.fsync", sync):
        resting = False
        work(lambda value: events.append(("mark", root, value)), *args)
        resting = True
    pipe.send(events)


@dataclass(eq=False)
class Node:
    """A file or folder of the simulated disk."""

    is_folder: bool
    entries: dict[str, Node] = field(default_factory=dict)  # as the process sees them
    synced: bytes = b""
    dirty: bool = True  # written since it was synced


class Disk:
    """The tree below a folder, first as it lies there, then as the recorded events change it."""

    def __init__(self, root: Path) -> None:
        self._place = root
        self._root = _read(root)
        self._changes: list[
            tuple[list[tuple[Node, str, Node | None]], bool]
        ] = []  # and whether they are safe
        self._start = _listing(self._root)

    def play(self, event: Event) -> None:
        """Do what the process did."""
        kind, path, more = event
        if kind == "sync":
            node = self._find(path)
            node.synced, node.dirty = more or b"", False
            self._changes = [
                (edits, safe or any(at is node for at, _, _ in edits)) for edits, safe in self._changes
            ]
        elif kind == "write":
            old = self._find(path.parent).entries.get(path.name)
            if old is None:
                self._edit((path, Node(is_folder=False)))
            else:
                old.dirty = True
        elif kind == "os.mkdir":
            if path.name not in self._find(path.parent).entries:  # else it fails, which `exist_ok` allows
                self._edit((path, Node(is_folder=True)))
        elif kind == "os.rename":
            self._edit((path, None), (more, self._find(path)))
        elif kind == "os.link":
            self._edit((more, self._find(path)))
        elif kind != "mark" and path.name in self._find(path.parent).entries:  # removed; else `missing_ok`
            self._edit((path, None))

    def names(self) -> set[str]:
        """Return all paths, as the process sees them."""
        return _names(self._root)

    def after_cut(self, folder: Path, draw: random.Random, likely: float) -> None:
        """Write what may be left after a power cut; each change that is not safe is there if luck has it."""
        left = {node: dict(entries) for node, entries in self._start.items()}
        for edits, safe in self._changes:
            if safe or draw.random() < likely:
                for node, name, entry in edits:
                    held = left.setdefault(node, {})
                    held.pop(name, None)
                    if entry is not None:
                        held[name] = entry
        _write(self._root, folder, left, draw)

    def _find(self, path: Path) -> Node:
        node = self._root
        for name in path.relative_to(self._place).parts:
            node = node.entries[name]
        return node

    def _edit(self, *places: tuple[Path, Node | None]) -> None:
        edits = [(self._find(path.parent), path.name, node) for path, node in places]
        for folder, name, node in edits:
            folder.entries.pop(name, None)
            if node is not None:
                folder.entries[name] = node
        self._changes.append((edits, False))


def _read(path: Path) -> Node:
    if path.is_dir():
        return Node(True, {entry.name: _read(entry) for entry in path.iterdir()}, dirty=False)
    return Node(False, synced=path.read_bytes(), dirty=False)


def _listing(node: Node) -> dict[Node, dict[str, Node]]:
    found = {node: dict(node.entries)}
    for entry in node.entries.values():
        found |= _listing(entry)
    return found


def _names(node: Node, prefix: str = "") -> set[str]:
    inner = [_names(entry, f"{prefix}{name}/") for name, entry in node.entries.items()]
    return {f"{prefix}{name}" for name in node.entries}.union(*inner)


def _write(node: Node, path: Path, left: dict[Node, dict[str, Node]], draw: random.Random) -> None:
    if node.is_folder:
        path.mkdir(parents=True)
        for name, entry in left.get(node, {}).items():
            _write(entry, path / name, left, draw)
    elif node.dirty:
        path.write_bytes(draw.choice([node.synced, b"", bytes(100), node.synced[: len(node.synced) // 2]]))
    else:
        path.write_bytes(node.synced)
