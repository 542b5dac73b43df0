"""Whether a run's data is what was prepared: files compared with their digests beside the first steps.

What was read and found right is kept in a cache by name, inode, size and time of each file: in the dataset's
folder, for all runs, or in the run's where that cannot be written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.data.dataset import check_digest
from shoal.errors import DataError, ShoalError, UnreadableError, counted
from shoal.runtime.files import read_json, reading, write_json
from shoal.runtime.log import log

CACHE = ".verified.json"
_ROUND_S = 1.0  # of waiting, after which ranks look at a stop and at each other
_TIMEOUT_S = 30.0  # in all, that checkpoints wait for the reading


class Verifier:
    """Compares files with their digests, as data.verify says. One process of each host does it."""

    def __init__(self, digests: Mapping[Path, str], mode: str, run_dir: Path, timeout_s: float) -> None:
        """Look which of the files are known to be right; nothing is read yet."""
        self._run_dir, self._full, self._timeout_s = run_dir, mode == "full", min(timeout_s, _TIMEOUT_S)
        self._files = {} if mode == "off" else dict(digests)
        with reading(run_dir):  # or a file: the error has its name
            if mode == "once":
                self._files = {
                    path: digest for path, digest in digests.items() if not self._is_known(path, digest)
                }
            num_bytes = sum(path.stat().st_size for path in self._files)
        what = f"{counted(len(self._files), 'file')}, {num_bytes / 1e9:.3g} GB"
        when = "before step 1" if self._full else "in the background of the first steps"
        self.plan = f"{mode}: {what}, {when}" if self._files else mode
        if mode == "once" and not self._files:
            self.plan = "once: unchanged since they were last verified"
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="verify", daemon=True)

    def begin(self, step: int) -> None:
        """Start reading before the steps after `step`."""
        self._step = step
        if self._files:
            self._thread.start()

    def blocks_training(self) -> bool:
        """Wait for a second with data.verify = full; return whether files are still to be read."""
        if self._full and self._thread.is_alive():
            self._thread.join(_ROUND_S)
        reading_on = self._full and self._thread.is_alive()  # looked at first: what ended it is known then
        self.poll()
        return reading_on

    def poll(self) -> None:
        """Raise what ended the reading early, if anything: a DataError where a file is damaged."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Give the reading time to end before a checkpoint counts; raise what it found."""
        if self._thread.is_alive():
            began = time.monotonic()
            self._thread.join(self._timeout_s)
            if self._thread.is_alive() and self._timeout_s:
                log.warning("warning: a checkpoint is written before the data is verified")
            self._timeout_s = max(0.0, self._timeout_s - (time.monotonic() - began))
        self.poll()

    def _work(self) -> None:
        try:
            self._verify()
        except BaseException as error:  # raised in the loop
            self._error = error

    def _verify(self) -> None:
        began, num_files, num_bytes = time.monotonic(), 0, 0
        for path, digest in self._files.items():
            try:
                with reading(path):
                    key, size = _key(path), path.stat().st_size
                check_digest(path, digest)
            except UnreadableError as error:  # nothing is known of what is in it
                if self._full:
                    raise
                log.warning(f"warning: the data could not be verified: {error.message}")
                continue
            except DataError as error:
                since = f"; steps after {self._step}, and their checkpoints, may have used it"
                raise DataError(error.message + ("" if self._full else since), hint=error.hint) from error
            self._write_cache(path, key, digest)
            num_files, num_bytes = num_files + 1, num_bytes + size
        if num_files:
            gb, seconds = num_bytes / 1e9, max(time.monotonic() - began, 1e-9)
            log.debug(f"data verified: {counted(num_files, 'file')}, {gb:.3g} GB at {gb / seconds:.2g} GB/s")

    def _places(self, path: Path) -> tuple[Path, Path]:
        return path.parent / CACHE, self._run_dir / CACHE

    def _is_known(self, path: Path, digest: str) -> bool:
        return any(_read_cache(place).get(_key(path)) == digest for place in self._places(path))

    def _write_cache(self, path: Path, key: str, digest: str) -> None:
        for place in self._places(path):
            try:
                write_json(place, {**_read_cache(place), key: digest})
                return
            except (ShoalError, OSError):  # not ours to write to, or full: it is read again next time
                continue


def _key(path: Path) -> str:
    """Return what changes with a file: its name, inode, size and time."""
    facts = path.stat()
    return f"{path.name} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"


def _read_cache(place: Path) -> dict[str, Any]:
    try:
        known = read_json(place, "cache of verified files") if place.exists() else {}
    except (ShoalError, OSError):  # written by halves, or not by us: nothing is known
        return {}
    return known if isinstance(known, dict) else {}
