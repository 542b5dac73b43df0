"""Watch the ranks of a host, and report if they make no progress or their operations disagree.

Under Shoal's launcher, the launcher watches. Otherwise a thread of every rank watches, and the first one to
find trouble reports for its host. Hosts send each other the state of their ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.diagnosis.verdict import HangDiagnosis, Verdict, conclude
from shoal.diagnosis.views import Channel, Operation, RankView, read_recorder
from shoal.errors import EXIT_FAILED, ShoalError
from shoal.runtime.failure import Failure, record_failure
from shoal.runtime.flight_recorder import STACK_SIGNAL, UNRECORDED, recorder_path, stack_path
from shoal.runtime.rank_info import RankInfo

_PERIOD_S = 1.0
_WHOLE = 10  # operations are also compared at every so many polls with progress: 3 ms a rank
_START_S = 300.0  # for all ranks to begin, even if the limit is shorter
_STACKS_S = 3.0
_HOSTS_S = 5.0  # wait for the state of the other hosts' ranks
_IO_BYTES = 1 << 20  # a rank that reads or writes this much in a period makes progress: loading, saving
_TOLD_OPERATIONS, _TOLD_STACK = 128, 8000
_SPEECH_S = 20.0


class Watch:
    """Detects that no rank makes progress, or that operations disagree. Poll it about once a second."""

    def __init__(
        self,
        run_dir: Path,
        ranks: Sequence[int],
        hang_s: float,
        host: str = "",
        share: Callable[[Any], list[Any]] = lambda _: [],
    ) -> None:
        """Watch `ranks`, all on this host; `share` sends a value to other hosts and returns theirs."""
        self._run_dir, self._ranks, self._hang_s = run_dir, list(ranks), hang_s
        self._host, self._share = host, share
        self._due = self._since = time.monotonic()
        self._looks = 0
        self._seen: list[tuple[int, int]] = []
        self._wrong: Verdict | None = None

    def troubled(self) -> bool:
        """Check the ranks, if it is time to, and return whether they hang or disagree."""
        now = time.monotonic()
        if (late := now - self._due) < 0:
            return False
        if late > _PERIOD_S:  # the machine or this process was suspended, and maybe the ranks too
            self._since += late
        self._due = now + _PERIOD_S
        self._looks += 1
        still = now - self._since > 2 * _PERIOD_S
        whole = still or self._wrong is not None or self._looks % _WHOLE == 0
        views = [self._view(rank, whole=whole) for rank in self._ranks]
        if self._progressed(views):
            self._since = now
        quiet = now - self._since
        others = self._share({"quiet": quiet, "views": told(views) if still else []})
        if whole:
            wrong, self._wrong = (
                self._wrong,
                HangDiagnosis(views + heard(o["views"] for o in others)).mismatch(),
            )
            if wrong is not None and self._wrong is not None:  # seen twice: not half written
                return True
        begun = all(view.state != "absent" for view in views)
        limit = self._hang_s if begun else max(self._hang_s, _START_S)
        return min([quiet, *(other["quiet"] for other in others)]) > limit

    def views(self, *, stacks: bool = False) -> list[RankView]:
        """Read the flight recorders of this host's ranks, after asking the ranks for their stacks."""
        asked = {}
        for view in map(self._view, self._ranks if stacks else ()):
            with contextlib.suppress(OSError):
                if view.state == "running":
                    path = stack_path(self._run_dir, view.rank)
                    asked[view.rank] = path, path.stat().st_size
                    os.kill(view.pid, STACK_SIGNAL)
        until = time.monotonic() + _STACKS_S
        while time.monotonic() < until and any(path.stat().st_size == old for path, old in asked.values()):
            time.sleep(0.05)
        time.sleep(0.2 * stacks)  # for the rest of what has begun
        views = [self._view(rank) for rank in self._ranks]
        for view in views:
            if view.rank in asked:
                path, old = asked[view.rank]
                view.stack = path.read_bytes()[old:].decode(errors="replace")
        return views

    def explain(
        self,
        here: Failure | None,
        agree: Callable[[Failure | None, list[dict[str, Any]]], tuple[Failure | None, list[Any]]],
    ) -> tuple[Failure | None, Failure]:
        """Return the first cause over all hosts, None for a hang, and the text that describes it.

        `here` is the cause on this host. `agree` combines it, and the views of the ranks, with those of the
        other hosts.
        """
        own = self.views(stacks=here is None)
        cause, others = agree(here, told(own))
        return cause, conclude(self._run_dir, cause, own + heard(others))

    def is_leader(self) -> bool:
        """Return whether this process reports for its host: the first one that asks, as long as it lives."""
        try:
            handle = os.open(recorder_path(self._run_dir, self._ranks[0]), os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: all report
            pass
        return True

    def _view(self, rank: int, *, whole: bool = True) -> RankView:
        path = recorder_path(self._run_dir, rank)
        view = read_recorder(path, rank, whole=whole) or RankView(rank, "absent")
        state = _process_state(view.pid) if view.state == "running" else view.state
        return replace(view, state=state, host=self._host)

    def _progressed(self, views: list[RankView]) -> bool:
        before, self._seen = self._seen, [(view.beats, _io_bytes(view.pid) // _IO_BYTES) for view in views]
        return self._seen != before or any(view.phase == UNRECORDED for view in views)


def told(views: Sequence[RankView]) -> list[dict[str, Any]]:
    """Shorten views and turn them into JSON values, for other hosts."""
    return [
        asdict(replace(v, operations=v.operations[-_TOLD_OPERATIONS:], stack=v.stack[-_TOLD_STACK:]))
        for v in views
    ]


def heard(values: Any) -> list[RankView]:
    """Return the views of other hosts, the inverse of `told`."""
    views = []
    for value in (value for of_host in values for value in of_host):
        channels = {name: Channel(*channel) for name, channel in value["channels"].items()}
        operations = [Operation(*operation) for operation in value["operations"]]
        views.append(RankView(**{**value, "channels": channels, "operations": operations}))
    return views


def watch_from_within(info: RankInfo, run_dir: Path, hang_s: float) -> None:
    """Watch in a thread of this rank, for ranks without Shoal's launcher; a verdict ends the process.

    Called on every rank once all have joined. Each host is assumed to have neighbouring ranks.
    """
    first = info.rank - info.local_rank
    several = info.is_on_several_hosts
    default: Any = dist.distributed_c10d._get_default_store()  # private; seen on torch 2.11 to 2.13
    store: dist.Store | None = default.clone() if several else None  # a connection that nobody else blocks
    here = socket.gethostname() if several else ""
    watch = Watch(run_dir, range(first, first + info.local_world_size), hang_s, here)

    def look() -> None:
        while not watch.troubled():
            time.sleep(_PERIOD_S / 2)
        if watch.is_leader():
            views = watch.views(stacks=True)
            everybody = views if store is None else _told_through(store, views, info)
            error = ShoalError(conclude(run_dir, None, everybody).sentence)
            record_failure(run_dir, info.rank, info.attempt, error)
            for view in views:
                if view.state == "stopped":  # it would not be told of the end
                    os.kill(view.pid, signal.SIGKILL)
            os.write(2, f"error: {error}\n".encode())
            time.sleep(_HOSTS_S * several)  # else the others fail by this end, unreported
        else:
            time.sleep(_SPEECH_S)  # the launcher may end all ranks with the first one
        os._exit(EXIT_FAILED)

    threading.Thread(target=look, name="watch", daemon=True).start()


def _told_through(store: dist.Store, views: list[RankView], info: RankInfo) -> list[RankView]:
    """Exchange the state of ranks with the reporting processes of other hosts, for a limited time."""
    known = {view.rank: view for view in views}

    def exchange() -> None:
        for view in views:
            store.set(f"view{view.rank}", json.dumps(told([view])))
        while missing := [rank for rank in range(info.world_size) if rank not in known]:
            for rank in missing:
                if store.check([f"view{rank}"]):
                    known[rank] = heard([json.loads(store.get(f"view{rank}"))])[0]
            time.sleep(_PERIOD_S / 4)

    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(_HOSTS_S)
    return list(known.copy().values())


def _process_state(pid: int) -> str:
    """Return whether a process of this host is running, stopped or gone (the last two on Linux only)."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone" if sys.platform == "linux" else "running"
    return "gone" if letter in "ZX" else "stopped" if letter in "Tt" else "running"


def _io_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written (Linux; 0 elsewhere)."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines[:2])
    except (OSError, IndexError, ValueError):
        return 0
