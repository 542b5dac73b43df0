"""Whether a run's data is what was prepared: files compared with their digests beside the first steps.

What was read and found right is remembered by name, inode, size and time of each file: in the dataset's
folder, for all runs, or in the run's where that cannot be written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.data.dataset import check_digest
from shoal.errors import DataError, InputError, ShoalError
from shoal.runtime.files import read_json, write_json
from shoal.runtime.log import log

MEMORY = ".verified.json"
_PATIENCE_S = 30.0  # in all, that checkpoints wait for the reading


class Verifier:
    """Compares files with their digests, as data.verify says. One process of each host does it."""

    def __init__(self, digests: Mapping[Path, str], mode: str, run_dir: Path, patience_s: float) -> None:
        """Look which of the files are known to be right; nothing is read yet."""
        self._run_dir, self._full, self._patience_s = run_dir, mode == "full", min(patience_s, _PATIENCE_S)
        self._files = {} if mode == "off" else dict(digests)
        if mode == "once":
            self._files = {
                path: digest for path, digest in digests.items() if not self._is_known(path, digest)
            }
        self._bytes = sum(path.stat().st_size for path in self._files)
        what = f"{len(self._files)} file(s), {self._bytes / 1e9:.3g} GB"
        when = "before step 1" if self._full else "in the background of the first steps"
        self.plan = f"{mode}: {what} are read {when}" if self._files else mode
        if mode == "once" and not self._files:
            self.plan = "once: the same files were read and found right before"
        self._error: ShoalError | None = None
        self._thread = threading.Thread(target=self._work, name="verify", daemon=True)

    def begin(self, step: int) -> None:
        """Start reading before the steps after `step`; with data.verify = full, end it, too."""
        self._step = step
        if self._files:
            self._thread.start()
        if self._full and self._files:
            self._thread.join()
        self.poll()

    def poll(self) -> None:
        """Raise the DataError that was found so far, if any."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Give the reading time to end before a checkpoint counts; raise what it found."""
        if self._thread.is_alive():
            began = time.monotonic()
            self._thread.join(self._patience_s)
            if self._thread.is_alive() and self._patience_s:
                log.warning("warning: the data is not verified yet; a checkpoint is written all the same")
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began))
        self.poll()

    def _work(self) -> None:
        began = time.monotonic()
        try:
            for path, digest in self._files.items():
                mark = _mark(path)
                check_digest(path, digest)
                self._remember(path, mark, digest)
        except ShoalError as error:
            since = f"; steps after {self._step}, and checkpoints of them, may have been trained on it"
            self._error = DataError(error.message + ("" if self._full else since), hint=error.hint)
            return
        size, seconds = self._bytes / 1e9, max(time.monotonic() - began, 1e-9)
        log.info(f"data verified: {len(self._files)} file(s), {size:.3g} GB at {size / seconds:.2g} GB/s")

    def _places(self, path: Path) -> tuple[Path, Path]:
        return path.parent / MEMORY, self._run_dir / MEMORY

    def _is_known(self, path: Path, digest: str) -> bool:
        return any(_recall(place).get(_mark(path)) == digest for place in self._places(path))

    def _remember(self, path: Path, mark: str, digest: str) -> None:
        for place in self._places(path):
            try:
                write_json(place, {**_recall(place), mark: digest})
                return
            except ShoalError:  # not ours to write to, or full; known nowhere, it is read again next time
                continue


def _mark(path: Path) -> str:
    """Return what changes with a file: its name, inode, size and time."""
    facts = path.stat()
    return f"{path.name} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"


def _recall(place: Path) -> dict[str, Any]:
    try:
        known = read_json(place, "memory of verified files") if place.exists() else {}
    except InputError:  # written by halves, or not by us: nothing is known
        return {}
    return known if isinstance(known, dict) else {}
