"""Stopping on request: signals, time and step limits, and an agreement of all ranks before a save."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from shoal.config.sections import Runtime
from shoal.runtime.failure import record_failure
from shoal.runtime.log import log
from shoal.runtime.process import Process
from shoal.runtime.startup import SIGNALS

_ORPHAN_GRACE_S = 2.0  # time for the launcher to say that a SIGTERM was the user's wish
STARTED = "SHOAL_STARTED"  # when the first launcher began: the time limit counts over restarts
_PARENT_POLL_S = 1.0


def stop_marker(run_dir: Path) -> Path:
    """Return the file by which the launcher tells its workers that the user asked for a stop."""
    return run_dir / "ranks" / "stop-requested"


def stopped_marker(run_dir: Path) -> Path:
    """Return the file by which workers tell their launcher that they stopped on request, all saved."""
    return run_dir / "ranks" / "stopped"


def end_with_launcher(launcher: int) -> None:
    """End this process soon after its launcher was killed, whatever it waits for: the store is gone, too."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)  # nobody would restart or report this rank

    threading.Thread(target=watch, daemon=True).start()


class Stop:
    """Whether the run should end early, agreed by all ranks at the same step.

    A SIGTERM may also come from the agent that ends the survivors of a dead rank. Nothing may be saved then:
    the agreement fails for want of the dead rank, and under our own launcher (`launched`) a rank that finds
    no stop marker leaves after a short grace.
    """

    def __init__(self, process: Process, run_dir: Path, runtime: Runtime, *, launched: bool) -> None:
        self._process = process
        self._run_dir = run_dir
        self._runtime = runtime
        self._launched = launched
        started = float(os.environ.get(STARTED, time.time()))
        self._deadline = started + runtime.max_time_s if runtime.max_time_s else None
        self._signal = ""
        self._time_is_up = f"the time limit of {runtime.max_time_s:g} s"
        self._step_is_reached = f"--stop-after {runtime.stop_after}"
        self._reasons = (self._time_is_up, self._step_is_reached, *(number.name for number in SIGNALS))
        self.reason = ""  # the same on all ranks, once they agreed to stop

    def listen(self) -> None:
        """Install the signal handlers, except where a signal is ignored, as SIGHUP is under nohup.

        A launched rank hears signals in a thread of its own: Python calls no handler while the main thread
        waits in a library for a peer that is gone.
        """
        if self._launched:
            heard, told = socket.socketpair()
            told.setblocking(False)
            signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)
            threading.Thread(target=self._hear, args=(heard,), daemon=True).start()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, (lambda *_: None) if self._launched else self._on_signal)

    def requested(self, step: int | None = None) -> bool:
        """Say whether to stop now; `step` counts against runtime.stop_after. Collective over the world."""
        return self.count(self._process.sum(*self.votes(step)))

    def votes(self, step: int | None = None) -> list[float]:
        """Return 1 for the reason why this rank should end now and 0 for each other; ranks add them up."""
        here = self.reason_here()
        if not here and step is not None and step == self._runtime.stop_after:
            here = self._step_is_reached
        return [float(here == reason) for reason in self._reasons]

    def count(self, votes: Sequence[float]) -> bool:
        """Take the sums over all ranks; say whether to stop now.

        One rank alone may know it yet: its clock is ahead, or the signal came between two ranks' looks.
        """
        asked = [reason for reason, count in zip(self._reasons, votes, strict=True) if count]
        self.reason = asked[-1] if asked else self.reason
        return bool(asked)

    def reason_here(self) -> str:
        """Return why this rank should end whatever its step; empty where it need not."""
        if self._deadline is not None and time.time() > self._deadline:
            return self._asked() or self._time_is_up
        return self._asked()

    def _asked(self) -> str:
        """Return the signal by which the user asked for a stop; our launcher's marker outlives restarts."""
        if not self._launched:
            return self._signal
        marker = stop_marker(self._run_dir)
        return (marker.read_text() or "SIGTERM") if marker.exists() else ""

    def _hear(self, heard: socket.socket) -> None:
        while True:
            if (number := heard.recv(1)[0]) in SIGNALS:
                self._on_signal(number)

    def _on_signal(self, number: int, frame: FrameType | None = None) -> None:
        if self._signal:  # asked twice: at once, the last committed checkpoint stands
            os._exit(128 + number)
        self._signal = signal.Signals(number).name
        if self._launched:
            threading.Timer(_ORPHAN_GRACE_S, self._leave_unless_asked).start()
        else:
            log.info(
                f"{self._signal}: saving at the end of this step; press Ctrl-C again to stop immediately"
            )

    def _leave_unless_asked(self) -> None:
        if not stop_marker(self._run_dir).exists():
            record_failure(self._run_dir, self._process.rank, self._process.info.attempt, None)
            os._exit(1)
