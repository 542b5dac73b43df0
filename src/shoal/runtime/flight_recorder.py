"""Flight recorder: the last collectives of a rank, in a file that other processes read.

ranks/rank-N/flight-recorder is mapped into memory: a record costs no system call, and stays when the process
is stopped, killed or stuck. It is text, a JSON list a line, all lines equally long: first a heartbeat (step,
phase, whether the rank waits for others), then each group with the number of operations issued in it, then
the last operations. An operation has its number at both ends; one that is being written is left out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import itertools
import json
import mmap
import os
import signal
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, Concatenate, NamedTuple, ParamSpec

from shoal.runtime.files import disk_error
from shoal.runtime.log import log, rank_folder

SLOTS = 512
STACK_SIGNAL = signal.SIGUSR2  # Slurm's users like SIGUSR1 for their own ends
UNRECORDED = "unrecorded"  # the phase of a rank that records no more
CHANNELS = 64
LINE = 360
_TEXT = 64  # characters of a text that are kept
_ASK_S = 1.0  # between looks whether a GPU has come to what the host no longer waits for
_MAX_TEXTS = 4096  # operations whose texts are kept ready; more would be shapes without end
_words = threading.local()
P = ParamSpec("P")


class Issued(NamedTuple):
    """An operation that is about to be issued."""

    group: str
    direction: str  # "0>1" tells the two ways between two ranks apart
    tensor: Any  # None where ranks may differ
    about: Callable[[], tuple[str, list[int]]]  # gives the group's description and ranks


def _harmless(
    method: Callable[Concatenate[FlightRecorder, P], None],
) -> Callable[Concatenate[FlightRecorder, P], None]:
    """Keep training safe from the recording: its first error ends it, with a warning."""

    def guarded(self: FlightRecorder, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not self.given_up:
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self.give_up(error)

    return guarded


class FlightRecorder:
    """The writing end, in the rank itself."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Make the file anew; its blocks are written at once, as a full disk would kill a mapped process."""
        path = recorder_path(run_dir, rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with path.open("w+b") as file:
                file.write((b" " * (LINE - 1) + b"\n") * (1 + CHANNELS + SLOTS))
                file.flush()
                self._map = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise disk_error(error, path) from error
        self.given_up = False
        self.phase = "start"
        self._step = self._waits = 0
        self._pid = os.getpid()
        self._beats, self._numbers = itertools.count(1), itertools.count(1)
        self._lock = threading.RLock()
        self._not_reached: deque[Callable[[], bool]] = deque()
        self._asking = False
        self._channels: dict[tuple[str, str], tuple[int, str, itertools.count[int]]] = {}
        self._texts: dict[Any, str] = {}
        self._beat()

    @_harmless
    def mark(self, phase: str, step: int | None = None) -> None:
        """Say what the main thread begins to do."""
        self.phase = phase
        self._step = self._step if step is None else step
        self._beat()

    @_harmless
    def wait(self, change: int) -> None:
        """Count a thread in (1) or out (-1) that waits for other ranks."""
        with self._lock:
            self._waits += change
        self._beat()

    @_harmless
    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Count this rank as one that waits until `reached` says otherwise: a host goes on before its GPU.

        They are asked in the order in which they are given; on other streams one may be reached before.
        """
        with self._lock:
            self._not_reached.append(reached)
            if not self._asking:
                threading.Thread(target=self._keep_asking, name="flight-recorder", daemon=True).start()
            self._asking = True
        self._beat()

    @_harmless
    def record(self, name: str, look: Callable[[], Issued]) -> None:
        """Note an operation; `look` says in which group it is issued, and with what."""
        issued = look()
        channel = (issued.group, issued.direction)
        row, told, sequence = self._channels.get(channel) or self._open(issued)
        words = _words.__dict__.pop("next", "")
        code, line = _call_site()
        shape, dtype = (None, None) if issued.tensor is None else (issued.tensor.shape, issued.tensor.dtype)
        key = (name, shape, dtype, code, line, words)
        texts = self._texts.get(key) or self._spell(key)
        number, seq = next(self._numbers), next(sequence)
        at = 1 + CHANNELS + number % SLOTS
        self._write(at, f"[{number},{row},{seq},{self._step},{time.time():.3f},{texts},{number}]")
        self._write(1 + row, f"[{seq},{told}]")

    def give_up(self, error: Exception) -> None:
        """Record no more; nobody may take the silence for a hang."""
        self.given_up = True
        self._not_reached.clear()  # events of a failed device are not queried
        with contextlib.suppress(Exception):
            self.phase = UNRECORDED
            self._beat()
        log.warning(
            f"warning: operations are no longer recorded; a hang of this rank cannot be diagnosed: {error!r}"
        )

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self.given_up = True
            self._map.close()

    def _keep_asking(self) -> None:
        """Beat when a wait is over and the main thread, which may be in a call to the GPU, does not."""
        while not self.given_up:
            time.sleep(_ASK_S)
            self._ask()

    @_harmless
    def _ask(self) -> None:
        with self._lock:
            if self._not_reached and self._not_reached[0]() and not self.given_up:
                self._beat()

    def _beat(self) -> None:
        with self._lock:
            while self._not_reached and self._not_reached[0]():
                self._not_reached.popleft()
        waits = "true" if self._waits or self._not_reached else "false"
        self._write(0, f'[{self._pid},{next(self._beats)},{self._step},{waits},"{self.phase}"]')

    def _write(self, line: int, text: str) -> None:
        self._map[line * LINE : (line + 1) * LINE - 1] = text.encode().ljust(LINE - 1)

    def _open(self, issued: Issued) -> tuple[int, str, itertools.count[int]]:
        """Give a channel its line."""
        description, ranks = issued.about()
        steps = {b - a for a, b in itertools.pairwise(ranks)} or {1}
        # Groups lie regularly in the mesh; of another one only the ranks that used it are known.
        span = [ranks[0], ranks[-1] + 1, *steps] if len(steps) == 1 else [0, 0, 1]
        told = json.dumps([f"{issued.group[-_TEXT:]} {issued.direction}", description[:_TEXT], span])[1:-1]
        with self._lock:
            row = len(self._channels)
            if row == CHANNELS:
                raise LookupError(f"more than {CHANNELS} groups")
            channel = (issued.group, issued.direction)
            return self._channels.setdefault(channel, (row, told, itertools.count(1)))

    def _spell(self, key: tuple[Any, ...]) -> str:
        name, shape, dtype, code, line, words = key
        tensor = "" if shape is None else f"{list(shape)} {str(dtype).removeprefix('torch.')}"
        caller = f"{code.co_name} at {Path(code.co_filename).name}:{line}" if code else ""
        if len(self._texts) >= _MAX_TEXTS:
            self._texts.clear()
        self._texts[key] = json.dumps([text[:_TEXT] for text in (name, tensor, caller, words)])[1:-1]
        return self._texts[key]


_current: FlightRecorder | None = None


def install(recorder: FlightRecorder | None) -> None:
    """Make `recorder` the one that `mark` writes to; None ends that."""
    global _current
    _current = recorder


def mark(phase: str, step: int | None = None) -> str:
    """Say what this rank begins to do, where it has a flight recorder; return what it did before."""
    if _current is None:
        return ""
    before = _current.phase
    _current.mark(phase, step)
    return before


def label(words: str) -> None:
    """Give the next operation of this thread words for people, such as "gradient bucket 5"."""
    _words.next = words


def recorder_path(run_dir: Path, rank: int) -> Path:
    """Return the file that is a rank's flight recorder."""
    return rank_folder(run_dir, rank) / "flight-recorder"


def stack_path(run_dir: Path, rank: int) -> Path:
    """Return the file into which a rank writes its stacks when it is asked to."""
    return rank_folder(run_dir, rank) / "stack"


def answer_with_stacks(run_dir: Path, rank: int) -> None:
    """Write the stacks of all threads to ranks/rank-N/stack when asked to, even if stuck outside of Python.

    The handler stays to the end of the process: who asks must not kill it.
    """
    file = stack_path(run_dir, rank).open("w")
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


_OWN = {("shoal", "runtime", f"{name}.py") for name in ("flight_recorder", "recording", "process")}
_OWN |= {("shoal", "parallel", "tensor.py")}


@functools.cache
def is_plumbing(filename: str) -> bool:
    """Say whether a call site is sought further out: torch, the standard library, our own plumbing."""
    torch = importlib.util.find_spec("torch")
    inner = str(Path(torch.origin).parent) + os.sep if torch and torch.origin else "<"
    if filename.startswith(("<", inner)) or Path(filename).parts[-3:] in _OWN:
        return True
    return filename.startswith(sysconfig.get_path("stdlib") + os.sep) and "site-packages" not in filename


def _call_site() -> tuple[CodeType | None, int]:
    frame = sys._getframe(1)
    while frame is not None:
        if not is_plumbing(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, 0
