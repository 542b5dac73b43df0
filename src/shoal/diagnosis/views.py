"""View of a rank from outside: the file of its flight recorder, read while it runs or after its end."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shoal.runtime.flight_recorder import CHANNELS, LINE


class Operation(NamedTuple):
    """Operation between ranks, as issued by one rank."""

    channel: str
    seq: int  # in its channel, from 1
    step: int
    time: float
    name: str
    tensor: str  # "[2, 3] float32"
    caller: str  # "function at file:line", outside of torch
    words: str


class Channel(NamedTuple):
    """Group, or one direction between two ranks of a group, as recorded by one rank."""

    seq: int  # operations that the rank has issued in it
    description: str
    ranks: list[int]


@dataclass
class RankView:
    """State of a rank, seen from outside."""

    rank: int
    state: str = "running"  # or done, stopped, gone, absent (no recorder yet)
    host: str = ""  # if there are several
    pid: int = 0
    beats: int = 0
    step: int = 0
    waiting: bool = False
    phase: str = ""
    channels: dict[str, Channel] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    stack: str = ""


def read_recorder(path: Path, rank: int, *, whole: bool = True) -> RankView | None:
    """Read a flight recorder, without operations unless `whole`; None if there is none yet."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            # Mapped: bytes that are read would count as progress of a rank that watches itself.
            text = mapped[:] if whole else mapped[: (1 + CHANNELS) * LINE]
            lines = [_parse(line) for line in text.split(b"\n")]
    except (OSError, ValueError):  # none, or an empty one
        return None
    if len(lines) <= 1 + CHANNELS or not lines[0]:
        return None
    pid, beats, step, waiting, phase = lines[0]
    rows = dict(enumerate(lines[1 : 1 + CHANNELS]))
    named = {
        row: (line[1], Channel(line[0], line[2], list(range(*line[3])))) for row, line in rows.items() if line
    }
    slots = sorted(line for line in lines[1 + CHANNELS :] if line and line[0] == line[-1])
    operations = [Operation(named[row][0], *rest) for _, row, *rest, _ in slots if row in named]
    state = "done" if phase == "done" else "running"
    beats += sum(channel.seq for _, channel in named.values())
    return RankView(rank, state, "", pid, beats, step, waiting, phase, dict(named.values()), operations)


def _parse(line: bytes) -> list[Any]:
    """Parse a line; empty if the line is empty or is being written."""
    try:
        return list(json.loads(line)) if line.strip() else []
    except ValueError:
        return []
