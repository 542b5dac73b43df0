"""A torch profiler trace of some steps, on demand."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.runtime.files import disk_error
from shoal.runtime.log import log
from shoal.train.clock import StepClock


class StepProfiler:
    """Traces the steps of a window on this rank into RUN/profile, for chrome://tracing or Perfetto."""

    def __init__(self, window: tuple[int, ...], run_dir: Path, rank: int, clock: StepClock) -> None:
        self._window = window
        self._folder = run_dir / "profile"
        self._rank = rank
        self._clock = clock
        self._first = 0  # step that the running trace began with
        self._trace: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Start where the window does; a run that resumes inside it traces the rest."""
        if self._trace is None and self._window and self._window[0] <= step <= self._window[1]:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._clock.device.is_cuda:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._trace = torch.profiler.profile(activities=activities)
            self._trace.start()
            self._first = step
            self._clock.profiled = True

    def end(self, step: int, *, stopping: bool) -> None:
        """Write the trace after the window's last step, or the run's."""
        if self._trace is None or not (stopping or step == self._window[1]):
            return
        self._clock.device.synchronise()
        self._trace.stop()
        path = self._folder / f"rank-{self._rank}-steps-{self._first}-{step}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._trace.export_chrome_trace(str(path))
        except OSError as error:
            raise disk_error(error, path) from error
        self._trace = None
        self._clock.profiled = False
        log.info(f"profile of steps {self._first} to {step}: {path}")
