"""Warm processes on this machine that run functions together as ranks, one call after another.

Starting a process costs seconds, most of them torch's import. These are started once, forked from a server
that has imported torch and has no threads yet (spawned where fork is unsafe), and every call gets a process
group of its own, over loopback.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shoal.config.sections import Runtime
from shoal.errors import EXIT_FAILED, ShoalError
from shoal.runtime.device import select_device
from shoal.runtime.failure import is_peer_loss
from shoal.runtime.flight_recorder import STACK_SIGNAL
from shoal.runtime.log import quieten_libraries
from shoal.runtime.network import choose_interface
from shoal.runtime.process import Process, form_groups, leave
from shoal.runtime.rank_info import RankInfo
from shoal.runtime.startup import all_is_loaded

_START_LIMIT_S = 120.0
_GRACE_S = 5.0  # what the others get to report after a rank has failed
_STACK_S = 0.5  # for a silent rank to write its stack

Tell = Callable[[str], None]  # what a rank is doing now


@dataclass(frozen=True)
class _Failure:
    """How a rank failed; `secondary` if only because another one had."""

    sentence: str
    detail: str = ""
    secondary: bool = False
    exit_code: int = EXIT_FAILED


class WorkerPool:
    """Processes that run functions together as ranks; started when first needed, replaced after a failure."""

    def __init__(self, runtime: Runtime, preload: Sequence[str], size: int = 0) -> None:
        """Start `size` processes, more when a call needs them; `preload` are modules to import for all."""
        quieten_libraries()
        self._runtime = runtime
        self._calls = 0
        listener = socket.create_server(("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        own: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
        self._store = dist.TCPStore("127.0.0.1", self._port, **own)
        self._context: Any = process_context(preload)
        self._workers: list[_Worker] = []
        self._grow(size)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self._workers)

    def run(
        self,
        what: str,
        on_word: Tell,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Return what the top-level function `fn(process, tell, *args)` returned on each of the ranks.

        What rank 0 tells goes to `on_word`. A rank that raises, dies or tells nothing for longer than
        `timeout_s` (runtime.timeout_s, if not given) is a ShoalError that names `what` and the rank.
        """
        limit = {} if timeout_s is None else {"timeout_s": timeout_s}
        runtime = self._runtime.model_copy(update=limit)
        team = self._start(world_size, range(world_size), runtime, fn, args)
        return self._collect(what, on_word, team, runtime.timeout_s)

    @contextmanager
    def lead(self, world_size: int, fn: Callable[..., Any], *args: Any) -> Iterator[Process]:
        """Be rank 0 of a call while the context lasts; the other ranks run `fn(process, tell, *args)`."""
        self._start(world_size, range(1, world_size), self._runtime, fn, args)
        choose_interface("127.0.0.1", across_hosts=False)
        store = dist.PrefixStore(f"call{self._calls}", self._store)
        process = _join(store, self._runtime, RankInfo(0, world_size, 0, world_size))
        try:
            yield process
        finally:
            leave()

    def check(self) -> None:
        """Raise a ShoalError if a rank that this process leads has failed."""
        for rank, worker in enumerate(self._workers, start=1):
            if worker.pipe.poll():
                kind, failure = worker.receive()
                if kind == "failed":
                    raise ShoalError(f"{failure.detail}rank {rank} {failure.sentence}")

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            self._workers.append(_Worker(self._context, self._port))

    def _start(
        self, world_size: int, ranks: Sequence[int], runtime: Runtime, fn: Callable[..., Any], args: Any
    ) -> list[_Worker]:
        self._calls += 1
        self._grow(len(ranks))
        team = self._workers[: len(ranks)]
        for worker in team:
            worker.wait_until_ready()
        for rank, worker in zip(ranks, team, strict=True):
            info = RankInfo(rank, world_size, rank, world_size)
            worker.pipe.send((f"call{self._calls}", runtime, info, fn, args))
        return team

    def _collect(self, what: str, on_word: Tell, team: list[_Worker], timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        words = dict.fromkeys(range(len(team)), "its start")
        silent_s = timeout_s + _GRACE_S  # ranks that wait for a silent one give up first
        deadline = time.monotonic() + silent_s
        while len(results) + len(failures) < len(team):
            pipes: dict[Any, int] = {
                worker.pipe: rank for rank, worker in enumerate(team) if rank not in {*results, *failures}
            }
            spoke = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not spoke:
                break
            for pipe in spoke:
                rank = pipes[pipe]
                kind, value = team[rank].receive()
                if kind == "word":
                    words[rank] = value
                    deadline = deadline if failures else time.monotonic() + silent_s
                    if rank == 0:
                        on_word(value)
                elif kind == "done":
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(results) < len(team):
            silent = {rank: team[rank] for rank in words if rank not in {*results, *failures}}
            error = _error_of(what, words, failures, silent, timeout_s)
            self._end(team)  # torch counts process groups, and may count differently now
            raise error
        return [results[rank] for rank in range(len(team))]

    def _end(self, team: Sequence[_Worker]) -> None:
        for worker in list(team):
            worker.end()
            self._workers.remove(worker)


def process_context(preload: Sequence[str]) -> Any:
    """Return how processes are started: forked from a server that has imported `preload`, if fork is safe."""
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(list(preload))
    return context


def _error_of(
    what: str,
    words: dict[int, str],
    failures: dict[int, _Failure],
    silent: dict[int, _Worker],
    timeout_s: float,
) -> ShoalError:
    """Word the first real cause: a rank's own failure, then silence, then the loss of an unknown peer."""
    real = [(rank, failure) for rank, failure in failures.items() if not failure.secondary]
    if not real and silent:
        ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        first = next(iter(silent))
        return ShoalError(
            f"{silent[first].stacks()}{what}: {ranks} said nothing for {timeout_s:g} s since {words[first]}",
            hint="it hangs, or needs longer: raise --runtime.timeout_s",
        )
    rank, failure = real[0] if real else next(iter(failures.items()))
    error = ShoalError(f"{failure.detail}{what}: after {words[rank]}, rank {rank} {failure.sentence}")
    error.exit_code = failure.exit_code
    return error


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, context: Any, port: int) -> None:
        self.pipe, theirs = context.Pipe()
        handle, name = tempfile.mkstemp(prefix="shoal-pool-")
        os.close(handle)
        self._stacks = Path(name)
        self._process = context.Process(target=_serve, args=(theirs, port, name), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def wait_until_ready(self) -> None:
        if not self._ready and not self.pipe.poll(_START_LIMIT_S):
            raise ShoalError(f"a worker process did not start in {_START_LIMIT_S:g} s", hint="shoal doctor")
        if not self._ready:
            kind, failure = self.receive()
            if kind != "ready":
                raise ShoalError(f"{failure.detail}a worker process {failure.sentence} at its start")
        self._ready = True

    def receive(self) -> tuple[str, Any]:
        """Receive a message; the end of the process is one, too."""
        try:
            kind, value = self.pipe.recv()
            return str(kind), value
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            if code is not None and code < 0:
                return "failed", _Failure(f"was killed by signal {-code} ({signal.Signals(-code).name})")
            return "failed", _Failure(f"ended with exit status {code}")

    def stacks(self) -> str:
        """Return what each thread does now."""
        os.kill(self._process.pid, STACK_SIGNAL)
        time.sleep(_STACK_S)
        return self._stacks.read_text()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._stacks.unlink(missing_ok=True)


def _serve(pipe: Connection, port: int, stacks: str) -> None:
    """Run what the pipe brings until the parent goes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    file = open(stacks, "w")  # noqa: SIM115  (to the end of the process)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    quieten_libraries()
    choose_interface("127.0.0.1", across_hosts=False)
    torch.set_num_interop_threads(1)
    all_is_loaded()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # once: now and then connecting takes 5 s
    pipe.send(("ready", None))
    while True:
        try:
            prefix, runtime, info, fn, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", _run(pipe, dist.PrefixStore(prefix, store), runtime, info, fn, args)))
        except BaseException as error:
            pipe.send(("failed", _describe(error)))


def _run(
    pipe: Connection, store: dist.Store, runtime: Runtime, info: RankInfo, fn: Callable[..., Any], args: Any
) -> Any:
    try:
        return fn(_join(store, runtime, info), lambda word: pipe.send(("word", word)), *args)
    finally:
        leave()
        _forget_meshes()
        gc.collect()  # models hold themselves in cycles


def _forget_meshes() -> None:
    """Clear DTensor's caches: their meshes equal those of the next call, and keep threads of dead groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        _redistribute._gen_transform_infos.cache_clear()


def _join(store: dist.Store, runtime: Runtime, info: RankInfo) -> Process:
    device = select_device(runtime.device, info.local_rank, info.local_world_size)
    timeout = timedelta(seconds=runtime.timeout_s)
    dist.init_process_group(
        device.backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout
    )
    return form_groups(info, device, runtime)


def _describe(error: BaseException) -> _Failure:
    if isinstance(error, ShoalError):
        return _Failure(f"failed: {error}", exit_code=error.exit_code)
    detail = "".join(traceback.format_exception(error))
    return _Failure(f"failed: {type(error).__name__}: {error}", f"{detail}\n", is_peer_loss(error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)  # whatever it waits for: nobody would hear of it
