"""The only module that knows Daft: it spreads ranges over worker processes and yields their results.

Daft runs in a process of its own, the driver, which starts the workers. The caller may then stop at any
moment, be it by an exception or by its death: the driver sees its standard input close and goes, the
workers see the driver gone and leave between two batches.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from dataclasses import asdict
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.data.prepare.work import RangeWorker, WorkSpec
from shoal.errors import ConfigError, ShoalError

_POLL_S = 0.2
_DEATH_S = 3.0  # how long Daft, which waits for a dead worker for ever, may have left to say
_LEAVE_S = 5.0  # how long workers may take to leave after a stop
_ALIVE = "worker-{}"  # each worker holds a lock on its own file as long as it lives
_SCRATCH = "scratch"  # the file that names the folder for sockets
_OWNER = "owner"  # the file in that folder that names ours: a note alone could name anybody's folder
_SHARED_MEMORY = Path("/dev/shm")
_LOG_NAME = "engine.log"
_LOG_TAIL = 2000
_DRIVER = "from shoal.data.prepare.engine import drive; drive()"
_SILENT = {
    "DO_NOT_TRACK": "1",
    "DAFT_ANALYTICS_ENABLED": "0",
    "DAFT_PROGRESS_BAR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def require_engine() -> None:
    """Raise ConfigError where Daft is not installed."""
    if importlib.util.find_spec("daft") is None:
        raise ConfigError("`shoal prepare` needs Daft", hint="pip install 'shoal[data]'")


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ranges(
    packed: list[dict[str, Any]], spec: WorkSpec, workers: int
) -> Generator[dict[str, Any], None, None]:
    """Yield each range's summary once it is committed, in any order; a worker's ShoalError is raised here.

    Between them comes, now and then, {"partial_bytes": n}: what was read of the ranges that are in work.
    """
    folder = Path(spec.folder)
    for old in folder.glob(_ALIVE.format("*")):
        old.unlink()
    reader, writer = os.pipe()
    scratch = Path(tempfile.mkdtemp(prefix="shoal-"))  # for Daft's sockets, whose paths must be short
    (scratch / _OWNER).write_text(str(folder.resolve()))
    (folder / _SCRATCH).write_text(str(scratch))
    with (folder / _LOG_NAME).open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(writer)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[writer],
            env={**os.environ, **_SILENT, "TMPDIR": str(scratch)},
            start_new_session=True,  # Ctrl-C reaches the whole group; the caller decides
        )
    os.close(writer)
    assert driver.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # then the log says why
            driver.stdin.write(json.dumps([asdict(spec), packed, workers]).encode() + b"\n")
            driver.stdin.flush()
        for result in _results(reader, folder):
            if "error" in result:
                raise _rebuild(result["error"])
            yield result
    finally:
        os.close(reader)
        driver.kill()
        driver.wait()
        with contextlib.suppress(BrokenPipeError):
            driver.stdin.close()
        remove_leftovers(folder)


def remove_leftovers(root: Path) -> None:
    """Remove what runs that worked below `root` have outside of it: temporary folder and shared memory.

    A run does so itself, if it is not killed; then the next one does.
    """
    for note in root.rglob(_SCRATCH):
        if note.is_symlink() or not note.is_file():
            continue
        _wait_for_workers(note.parent)  # of a run that was killed a moment ago
        scratch = Path(note.read_text(errors="replace")[:4096])
        owner = scratch / _OWNER
        with contextlib.suppress(OSError, ValueError):  # it is gone, or was never ours
            if owner.is_file() and owner.read_text(errors="replace") == str(note.parent.resolve()):
                for segment in _SHARED_MEMORY.glob(f"{_prefix(scratch)}*"):
                    segment.unlink(missing_ok=True)
                shutil.rmtree(scratch, ignore_errors=True)
        note.unlink()


def _prefix(scratch: Path) -> str:
    return scratch.name.removeprefix("shoal-")


def _name_shared_memory() -> None:
    """Have the segments of this process, by which Daft sends batches, begin with the scratch folder's name.

    A private name of Python's, tried with 3.11.7, 3.12.1 and 3.13.0; elsewhere a killed run would leave some
    hundred bytes.
    """
    setattr(shared_memory, "_SHM_NAME_PREFIX", f"/{_prefix(Path(tempfile.gettempdir()))}")  # noqa: B010


def _results(reader: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the driver sends until it says that all is done."""
    buffer, deadline = b"", math.inf
    while True:
        if not select.select([reader], [], [], _POLL_S)[0]:
            if time.monotonic() > deadline:
                raise _worker_died()
            yield {"partial_bytes": sum(map(_partial_bytes, folder.glob(_ALIVE.format("*"))))}
            if not _any_worker(folder, alive=False):
                deadline = math.inf
            elif deadline == math.inf:
                deadline = time.monotonic() + _DEATH_S
            continue
        data = os.read(reader, 1 << 16)
        if not data:
            raise _worker_died() if _any_worker(folder, alive=False) else _driver_died(folder)
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            if not line:
                return
            yield json.loads(line)


def drive() -> None:
    """Be the driver: read the work from standard input, write results to the pipe that argv names."""
    spec, packed, workers = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_leave_with_caller, daemon=True).start()
    _name_shared_memory()
    import daft

    job = daft.cls(_Job, use_process=True, max_concurrency=workers)(json.dumps(spec), os.getpid())
    table = daft.from_pydict({"range": [json.dumps(value) for value in packed]}).into_batches(1)
    with os.fdopen(int(sys.argv[1]), "w") as results:
        for row in table.select(job(daft.col("range")).alias("summary")).iter_rows(results_buffer_size=None):
            results.write(row["summary"] + "\n")
            results.flush()
        results.write("\n")
        results.flush()
        sys.stdin.buffer.read()  # the caller ends this process


def _leave_with_caller() -> None:
    """End this process when the caller closes its end, by will or by death."""
    sys.stdin.buffer.read()
    os._exit(1)


class _Job:
    """What Daft starts in each worker process and calls for each range."""

    def __init__(self, spec: str, driver: int) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _name_shared_memory()
        self._spec = WorkSpec(**json.loads(spec))
        self._driver = driver
        self._worker: RangeWorker | None = None
        path = Path(self._spec.folder) / _ALIVE.format(os.getpid())
        hidden = path.with_name(f".{path.name}")  # a worker that is seen without its lock counts as dead
        self._alive = hidden.open("w")
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        hidden.rename(path)
        self._check(0)

    def __call__(self, packed: str) -> str:
        """Do one range; what goes wrong is a result, not an exception: Daft would hide it in its own."""
        try:
            self._worker = self._worker or RangeWorker(self._spec)
            summary = json.dumps(self._worker.run(json.loads(packed), self._check))
            self._leave_if_alone()
            return summary
        except ShoalError as error:
            return json.dumps({"error": [type(error).__name__, error.message, error.hint]})
        except Exception:
            return json.dumps({"error": ["", traceback.format_exc(), ""]})

    def _check(self, read_bytes: int) -> None:
        """Note how far this worker is; leave when the driver is gone."""
        os.pwrite(self._alive.fileno(), b"%20d" % read_bytes, 0)
        self._leave_if_alone()

    def _leave_if_alone(self) -> None:
        """End this process where the driver is gone: its answer would stay in shared memory."""
        if os.getppid() != self._driver:
            os._exit(1)


def _partial_bytes(path: Path) -> int:
    """Return what a worker noted last; the files are smaller than a disk's block, so no note is torn."""
    return int(path.read_bytes() or 0)


def _any_worker(folder: Path, *, alive: bool) -> bool:
    """Tell whether any worker that was started is alive, or dead: then its lock is free."""
    for path in folder.glob(_ALIVE.format("*")):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                found = True
            else:
                found = False
        if found == alive:
            return True
    return False


def _wait_for_workers(folder: Path) -> None:
    """Wait a moment until no worker writes any more."""
    until = time.monotonic() + _LEAVE_S
    while _any_worker(folder, alive=True) and time.monotonic() < until:
        time.sleep(0.02)


def _worker_died() -> ShoalError:
    """Say that a worker was killed."""
    return ShoalError(
        "a worker process died, often for lack of memory; what was done is kept",
        hint="run the same command again to continue, with fewer --workers where memory is short",
    )


def _driver_died(folder: Path) -> ShoalError:
    """Say that the engine failed, in its own words."""
    words = (folder / _LOG_NAME).read_bytes()[-_LOG_TAIL:].decode(errors="replace")
    return ShoalError(f"the preparation engine failed; what was done is kept:\n{words}")


def _rebuild(parts: list[str]) -> Exception:
    """Turn an error that crossed a process boundary back into its kind."""
    if not parts[0]:
        return RuntimeError(f"a worker failed:\n{parts[1]}")
    kind = getattr(errors, parts[0], ShoalError)
    rebuilt: ShoalError = kind(parts[1], hint=parts[2])
    return rebuilt
