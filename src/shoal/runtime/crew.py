"""Warm processes on this machine that take seats together, for one call after another.

Starting a process costs seconds, most of them torch's import. These are started once, forked from a server
that has imported torch and has no threads yet (spawned where fork is unsafe), and every call gets a process
group of its own, over loopback.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shoal.config.sections import Runtime
from shoal.errors import EXIT_FAILED, ShoalError
from shoal.runtime.device import select_device
from shoal.runtime.failure import is_peer_loss
from shoal.runtime.log import quieten_libraries
from shoal.runtime.network import choose_interface
from shoal.runtime.process import leave, take_seat
from shoal.runtime.seat import Seat
from shoal.runtime.startup import all_is_loaded

_START_LIMIT_S = 120.0
_GRACE_S = 5.0  # what the others get to say after a rank has failed

Tell = Callable[[str], None]  # what a rank is doing now


@dataclass(frozen=True)
class _Fall:
    """How a rank ended; `echo` where it fell only because another one had."""

    sentence: str
    detail: str = ""
    echo: bool = False
    exit_code: int = EXIT_FAILED


class Crew:
    """Processes that run functions together as ranks. After a ShoalError of `run` it is of no more use."""

    def __init__(self, size: int, runtime: Runtime, preload: Sequence[str]) -> None:
        """Start `size` processes; `preload` are modules to import once for all of them."""
        quieten_libraries()
        self._timeout_s = runtime.timeout_s
        self._calls = 0
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        context.set_forkserver_preload(list(preload))
        self._workers = [_Worker(context, port, runtime) for _ in range(size)]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()

    def run(self, what: str, on_word: Tell, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what the top-level function `fn(process, tell, *args)` returned on each of the ranks.

        What rank 0 tells goes to `on_word`. A rank that raises, dies or tells nothing for longer than
        runtime.timeout_s is a ShoalError that names `what` and the rank.
        """
        self._calls += 1
        team = self._workers[:world_size]
        for worker in team:
            worker.wait_until_ready()
        for rank, worker in enumerate(team):
            worker.pipe.send((f"call{self._calls}", Seat(rank, world_size, rank, world_size), fn, args))
        return self._collect(what, on_word, team)

    def _collect(self, what: str, on_word: Tell, team: list[_Worker]) -> list[Any]:
        results: dict[int, Any] = {}
        falls: dict[int, _Fall] = {}
        words = dict.fromkeys(range(len(team)), "its start")
        silent_s = self._timeout_s + _GRACE_S  # ranks that wait for a silent one give up first
        deadline = time.monotonic() + silent_s
        while len(results) + len(falls) < len(team):
            pipes: dict[Any, int] = {
                worker.pipe: rank for rank, worker in enumerate(team) if rank not in {*results, *falls}
            }
            spoke = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not spoke:
                break
            for pipe in spoke:
                rank = pipes[pipe]
                kind, value = team[rank].hear()
                if kind == "word":
                    words[rank] = value
                    deadline = deadline if falls else time.monotonic() + silent_s
                    if rank == 0:
                        on_word(value)
                elif kind == "done":
                    results[rank] = value
                else:
                    falls[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(results) < len(team):
            raise self._failure(what, words, results, falls)
        return [results[rank] for rank in range(len(team))]

    def _failure(
        self, what: str, words: dict[int, str], results: dict[int, Any], falls: dict[int, _Fall]
    ) -> ShoalError:
        """Word the first real cause: a rank's own fall, then silence, then the loss of an unknown peer."""
        real = [(rank, fall) for rank, fall in falls.items() if not fall.echo]
        silent = [rank for rank in words if rank not in {*results, *falls}]
        if not real and silent:
            ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            return ShoalError(
                f"{what}: {ranks} said nothing for {self._timeout_s:g} s since {words[silent[0]]}",
                hint="it hangs, or needs longer: raise --runtime.timeout_s",
            )
        rank, fall = real[0] if real else next(iter(falls.items()))
        error = ShoalError(f"{fall.detail}{what}: after {words[rank]}, rank {rank} {fall.sentence}")
        error.exit_code = fall.exit_code
        return error


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, context: Any, port: int, runtime: Runtime) -> None:
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, port, runtime), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def wait_until_ready(self) -> None:
        if not self._ready and not self.pipe.poll(_START_LIMIT_S):
            raise ShoalError(f"a worker process did not start in {_START_LIMIT_S:g} s", hint="shoal doctor")
        if not self._ready:
            kind, fall = self.hear()
            if kind != "ready":
                raise ShoalError(f"{fall.detail}a worker process {fall.sentence} at its start")
        self._ready = True

    def hear(self) -> tuple[str, Any]:
        """Receive a message; the end of the process is one, too."""
        try:
            kind, value = self.pipe.recv()
            return str(kind), value
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            if code is not None and code < 0:
                return "fell", _Fall(f"was killed by signal {-code} ({signal.Signals(-code).name})")
            return "fell", _Fall(f"ended with exit status {code}")

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(pipe: Connection, port: int, runtime: Runtime) -> None:
    """Run what the pipe brings until the parent goes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    quieten_libraries()
    choose_interface("127.0.0.1", across_hosts=False)
    torch.set_num_interop_threads(1)
    all_is_loaded()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    pipe.send(("ready", None))
    while True:
        try:
            prefix, seat, fn, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", _run(pipe, dist.PrefixStore(prefix, store), runtime, seat, fn, args)))
        except BaseException as error:
            pipe.send(("fell", _describe(error)))


def _run(
    pipe: Connection, store: dist.Store, runtime: Runtime, seat: Seat, fn: Callable[..., Any], args: Any
) -> Any:
    device = select_device(runtime.device, seat.local_rank, seat.local_world_size)
    timeout = timedelta(seconds=runtime.timeout_s)
    dist.init_process_group(
        device.backend, store=store, rank=seat.rank, world_size=seat.world_size, timeout=timeout
    )
    try:
        return fn(take_seat(seat, device, runtime), lambda word: pipe.send(("word", word)), *args)
    finally:
        leave()
        gc.collect()  # models hold themselves in cycles


def _describe(error: BaseException) -> _Fall:
    if isinstance(error, ShoalError):
        return _Fall(f"failed: {error}", exit_code=error.exit_code)
    detail = "".join(traceback.format_exception(error))
    return _Fall(f"failed: {type(error).__name__}: {error}", f"{detail}\n", is_peer_loss(error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)  # whatever it waits for: nobody would hear of it
