"""Spread the items of a job over worker processes of this machine, or over the nodes of a Ray cluster.

A job is a class that each worker makes once, from plain values; its method `run(item, check)` does one item
and returns plain values. `check(bytes)` notes how far it is, and ends a worker that nobody waits for.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from shoal import errors
from shoal.errors import ConfigError, InputError, ShoalError

LOCAL, RAY = "local", "ray"
_LOG_NAME = "engine.log"
_LOG_TAIL = 2000
_POLL_S = 0.2
_WORKER = "from shoal.data.prepare.engine import serve; serve()"
_ANSWER_S = 5.0
_PER_CORE = 2  # items that a Ray cluster has at a time for each core
Check = Callable[[int], None]


class Worker(Protocol):
    """What the class of a job makes."""

    def run(self, item: dict[str, Any], check: Check) -> dict[str, Any]:
        """Do one item; return its result."""


@dataclass(frozen=True)
class Job:
    """Work on many items: `module:class`, and what to make it of, as JSON values."""

    worker: str
    spec: dict[str, Any]

    def make(self) -> Worker:
        """Make the class, in the process that will run it."""
        module, _, name = self.worker.partition(":")
        return cast(Worker, getattr(importlib.import_module(module), name)(self.spec))


Results = Generator[dict[str, Any], None, None]


class Engine:
    """Where jobs run: `workers` processes here, with a log in `folder`, or a Ray cluster.

    The processes are started when first needed, and stay for the next job until the context ends.
    """

    def __init__(self, folder: Path, workers: int, runner: str = LOCAL) -> None:
        self._folder, self._workers, self._runner = folder, workers, runner
        self._processes: list[_Process] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        while self._processes:
            self._processes.pop().end()

    def run(self, job: Job, items: Sequence[dict[str, Any]]) -> Results:
        """Yield the result of each item, in any order. A worker's ShoalError is raised here.

        Between them comes, now and then, {"partial_bytes": n}: what was read of items that are in work. An
        item that was in work when the caller stopped may be done again: items are committed as a whole.
        """
        if not items:
            return
        found = _over_ray(job, items) if self._runner == RAY else self._here(job, items)
        with contextlib.closing(found):
            for result in found:
                if "error" in result:
                    raise _rebuild(result["error"])
                yield result

    def _here(self, job: Job, items: Sequence[dict[str, Any]]) -> Results:
        waiting, number = deque(items), min(self._workers, len(items))
        while len(self._processes) < number:
            self._processes.append(_Process(self._folder / _LOG_NAME))
        try:
            with selectors.DefaultSelector() as ready:
                for worker in self._processes[:number]:
                    ready.register(worker.results, selectors.EVENT_READ, worker)
                    worker.send({"job": [job.worker, job.spec]})
                    worker.send(waiting.popleft())
                while ready.get_map():
                    for key, _ in ready.select(_POLL_S):
                        yield from self._heard(key, waiting, ready)
                    yield {"partial_bytes": sum(key.data.partial_bytes for key in ready.get_map().values())}
        except BaseException:  # the caller's stop, too: what is in work is not wanted any more
            self.__exit__()
            raise

    def _heard(
        self, key: selectors.SelectorKey, waiting: deque[dict[str, Any]], ready: selectors.BaseSelector
    ) -> Results:
        """Yield the results that a worker has sent; give it the next item."""
        worker: _Process = key.data
        for message in worker.receive():
            worker.partial_bytes = message.get("partial_bytes", 0)
            if "partial_bytes" in message:
                continue
            yield message
            if waiting:
                worker.send(waiting.popleft())
            else:
                ready.unregister(worker.results)


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Process:
    """One worker process. It reads jobs and items as JSON lines, and leaves when this end is closed."""

    def __init__(self, log: Path) -> None:
        self.results, writer = os.pipe()
        self.partial_bytes, self._buffer, self._log = 0, b"", log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER, str(writer), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                pass_fds=[writer],
                start_new_session=True,  # Ctrl-C reaches the whole group; the caller decides
            )
        os.close(writer)

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        os.close(self.results)
        with contextlib.suppress(BrokenPipeError):
            cast(Any, self._process.stdin).close()

    def send(self, item: dict[str, Any]) -> None:
        stdin = cast(Any, self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it is dead: `receive` says so
            stdin.write(json.dumps(item).encode() + b"\n")
            stdin.flush()

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that are there; where none can come any more, say how the process ended."""
        if data := os.read(self.results, 1 << 16):
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            return [json.loads(line) for line in lines]
        if self._process.wait() < 0:
            raise ShoalError(
                "a worker process died, often for lack of memory; what was done is kept",
                hint="run the same command again to continue, with fewer --workers where memory is short",
            )
        words = self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
        raise ShoalError(f"a worker process failed; what was done is kept:\n{words}")


def serve() -> None:
    """Be a worker: read jobs and items from standard input; write results to the pipe that argv names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core
    parent, told = int(sys.argv[2]), 0.0

    def check(num_bytes: int) -> None:
        nonlocal told
        if os.getppid() != parent:
            os._exit(1)
        if time.monotonic() - told > _POLL_S:
            told = time.monotonic()
            _tell(results, {"partial_bytes": num_bytes})

    with os.fdopen(int(sys.argv[1]), "wb") as results, contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            message = json.loads(line)
            if "job" in message:
                job = Job(*message["job"])
            else:
                _tell(results, _do(job, message, check))


def _tell(results: Any, message: dict[str, Any]) -> None:
    results.write(json.dumps(message).encode() + b"\n")
    results.flush()


@lru_cache(maxsize=2)
def _worker(worker: str, spec: str) -> Worker:
    """Make a job's worker, once in each process."""
    return Job(worker, json.loads(spec)).make()


def _do(job: Job, item: dict[str, Any], check: Check) -> dict[str, Any]:
    """Do one item; what goes wrong is a result, which crosses to the caller."""
    try:
        return _worker(job.worker, json.dumps(job.spec)).run(item, check)
    except ShoalError as error:
        return {"error": [type(error).__name__, error.message, error.hint]}
    except Exception:
        return {"error": ["", traceback.format_exc(), ""]}


def _rebuild(parts: list[str]) -> Exception:
    """Turn an error that crossed a process boundary back into its kind."""
    if not parts[0]:
        return RuntimeError(f"a worker failed:\n{parts[1]}")
    kind = getattr(errors, parts[0], ShoalError)
    rebuilt: ShoalError = kind(parts[1], hint=parts[2])
    return rebuilt


def _over_ray(job: Job, items: Sequence[dict[str, Any]]) -> Results:
    """Run the items as tasks of the Ray cluster that RAY_ADDRESS names, or that runs on this host.

    Its nodes see the same files under the same paths. A task whose worker or node dies is run again.
    """
    ray = _connected_ray()
    remote = ray.remote(max_retries=3, num_cpus=1)(_do_on_node)
    waiting, running = iter(items), dict[Any, None]()
    most = _PER_CORE * max(1, int(ray.cluster_resources().get("CPU", 1)))
    try:
        while True:
            for item in islice(waiting, most - len(running)):
                running[remote.remote(job.worker, job.spec, item)] = None
            if not running:
                return
            done, _ = ray.wait(list(running), timeout=_POLL_S)
            for task in done:
                del running[task]
                try:
                    yield ray.get(task)
                except ray.exceptions.RayError as error:
                    raise ShoalError(
                        f"a task of the Ray cluster failed; what was done is kept: {error}"
                    ) from None
    finally:
        for task in running:
            ray.cancel(task, force=True)


def _do_on_node(worker: str, spec: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return _do(Job(worker, spec), item, lambda _: None)


def _connected_ray() -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when it is imported
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--runner ray needs Ray", hint="pip install 'shoal[ray]'") from error
    if not ray.is_initialized():
        host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
        try:
            if host and port.isdigit():  # Ray itself would wait for minutes
                socket.create_connection((host.rpartition("/")[2], int(port)), _ANSWER_S).close()
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"no Ray cluster answers: {error}",
                hint="start one with `ray start --head`, or name one with RAY_ADDRESS=HOST:PORT",
            ) from error
    return ray
