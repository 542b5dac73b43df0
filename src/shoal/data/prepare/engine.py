"""The only module that knows Daft: it spreads ranges over worker processes and yields their results."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.data.prepare.work import STOP_NAME, RangeWorker, WorkSpec
from shoal.errors import ConfigError, ShoalError, StoppedError

_POLL_S = 0.1  # how long a signal may wait for an answer
_LEAVE_S = 5.0  # how long workers may take to leave after a stop
_SILENT = {
    "DO_NOT_TRACK": "1",
    "DAFT_ANALYTICS_ENABLED": "0",
    "DAFT_PROGRESS_BAR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def run_ranges(
    packed: list[dict[str, Any]], spec: WorkSpec, workers: int
) -> Generator[dict[str, Any], None, None]:
    """Yield each range's summary once it is committed, in any order; a worker's ShoalError is raised here.

    Daft runs in a thread of its own, so that a signal reaches the caller at once. When the caller stops
    listening, the workers leave between two batches and their unfinished files go with them.
    """
    stop = Path(spec.folder) / STOP_NAME
    stop.unlink(missing_ok=True)
    results: queue.Queue[dict[str, Any] | BaseException | None] = queue.Queue()
    thread = threading.Thread(target=_drive, args=(packed, spec, workers, results), daemon=True)
    thread.start()
    try:
        while True:
            try:
                result = results.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if result is None:
                return
            if isinstance(result, BaseException):
                raise result
            if "error" in result:
                raise _rebuild(result["error"])
            yield result
    finally:
        stop.touch()
        thread.join(_LEAVE_S)


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _drive(
    packed: list[dict[str, Any]],
    spec: WorkSpec,
    workers: int,
    results: queue.Queue[dict[str, Any] | BaseException | None],
) -> None:
    """Run the plan and put its rows, or what went wrong, into the queue."""
    try:
        daft = _import_daft()
        job = daft.cls(_Job, use_process=True, max_concurrency=workers)(json.dumps(asdict(spec)))
        table = daft.from_pydict({"range": [json.dumps(value) for value in packed]}).into_batches(1)
        for row in table.select(job(daft.col("range")).alias("summary")).iter_rows(results_buffer_size=None):
            results.put(json.loads(row["summary"]))
        results.put(None)
    except BaseException as error:
        results.put(error)


def _import_daft() -> Any:
    """Import Daft with its usage reporting and its own progress bar off."""
    os.environ.update(_SILENT)
    try:
        import daft
    except ImportError as error:
        raise ConfigError("`shoal prepare` needs Daft", hint="pip install 'shoal[data]'") from error
    return daft


class _Job:
    """What Daft starts in each worker process and calls for each range."""

    def __init__(self, spec: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
        self._spec = WorkSpec(**json.loads(spec))
        self._parent = os.getppid()
        self._worker: RangeWorker | None = None

    def __call__(self, packed: str) -> str:
        """Do one range; an error that a person can act on is a result, not an exception."""
        try:
            self._worker = self._worker or RangeWorker(self._spec)
            return json.dumps(self._worker.run(json.loads(packed), self._check))
        except ShoalError as error:
            return json.dumps({"error": [type(error).__name__, error.message, error.hint]})

    def _check(self) -> None:
        """Leave when asked to, or when the parent is gone."""
        if os.getppid() != self._parent or (Path(self._spec.folder) / STOP_NAME).exists():
            raise StoppedError("stopped on request")


def _rebuild(parts: list[str]) -> ShoalError:
    """Turn an error that crossed a process boundary back into its kind."""
    kind = getattr(errors, parts[0], ShoalError)
    return kind(parts[1], hint=parts[2])
