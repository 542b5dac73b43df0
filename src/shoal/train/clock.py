"""Where the time of a step goes, and the rates that follow from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from shoal.runtime.device import Device
from shoal.runtime.flight_recorder import mark

# "tp" and "shard" are the time that a rank waits for exchanges of tensor parallelism and of ZeRO within
# forward and backward. On a GPU, where ZeRO has a stream of its own, "shard" is 0. "bubble" is waiting for
# other parts of a pipeline; "communication" the rest: between replicas, and what a step's end waits for.
PHASES = ("data", "forward", "backward", "tp", "shard", "bubble", "communication", "optimiser")
_MEAN_DECAY = 0.9  # looks back some 10 steps


@dataclass
class StepClock:
    """Times a step and its phases.

    On CUDA a phase lasts from the moment that the GPU reaches its beginning until it reaches its end; nothing
    waits for the GPU before the times are read.
    """

    device: Device
    now: Callable[[], float] = time.perf_counter
    profiled: bool = False  # name the phases in a running trace: 30 us each, so only then
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    _began: Any = 0.0

    def begin(self, step: int | None = None) -> None:
        """Start a step."""
        mark("", step)
        self.spans = []
        self._began = self.read()

    def phase(self, name: str) -> Phase:
        """Add the time of the block under this context to a phase, in seconds."""
        return Phase(self, name)

    def read(self) -> Any:
        """Return this moment of the device: seconds, or an event on the GPU's queue."""
        if not self.device.is_cuda:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self) -> StepTime:
        """End the step; waits for nothing."""
        return StepTime(self._began, self.read(), self.spans)


@dataclass(frozen=True)
class StepTime:
    """The moments of a step that has ended on the host, and on a GPU's queue perhaps not yet."""

    began: Any
    ended: Any
    spans: list[tuple[str, Any, Any]]

    def wait(self) -> None:
        """Wait until all work of the step is done."""
        if not isinstance(self.ended, float):
            self.ended.synchronize()

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the seconds of the step and of each of PHASES; waits for the step's work."""
        self.wait()
        phases = dict.fromkeys(PHASES, 0.0)
        seconds = _seconds(self.began, self.ended)
        for name, first, last in self.spans:
            phases[name] += _seconds(first, last)
        # A pipeline is timed as a whole, and its computations within it: the rest is waiting for other parts.
        if phases["bubble"]:
            phases["bubble"] -= phases["forward"] + phases["backward"]
        return seconds, phases


def _seconds(first: Any, last: Any) -> float:
    return last - first if isinstance(last, float) else float(first.elapsed_time(last)) / 1e3


class Phase:
    """A stretch of a phase. A class, as a generator would cost three times as much."""

    __slots__ = ("_clock", "_first", "_label", "_name", "_outer")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._outer = mark(self._name)
        self._label = record_function(self._name).__enter__() if self._clock.profiled else None
        self._first = self._clock.read()

    def __exit__(self, *error: object) -> None:
        self._clock.spans.append((self._name, self._first, self._clock.read()))
        mark(self._outer)
        if self._label is not None:
            self._label.__exit__(None, None, None)


@dataclass
class Rates:
    """Means over the steps since the last log line."""

    unit: str  # what targets are called: tokens, examples
    per_step: int  # targets
    world_size: int
    flops_per_target: int
    matmul_flops: float  # measured on this rank's device, in FLOP/s
    peak_flops: float | None  # specified, of one device; None where unknown
    steps: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    recent_s: float | None = None  # of a step, a running mean

    def add(self, seconds: float, phases: dict[str, float]) -> None:
        """Count one step."""
        self.recent_s = seconds + _MEAN_DECAY * ((self.recent_s or seconds) - seconds)
        self.steps += 1
        self.seconds += seconds
        for name, value in phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + value

    def take(self) -> dict[str, float | None]:
        """Return rates since the last call, per step and second, and start anew."""
        step_s = self.seconds / max(1, self.steps)
        per_s = self.per_step / step_s if step_s else 0.0
        per_device = per_s / self.world_size
        flops = per_device * self.flops_per_target
        rates = {
            "step_ms": step_s * 1e3,
            f"{self.unit}_per_s": per_s,
            f"{self.unit}_per_s_per_device": per_device,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "mfu_measured": flops / self.matmul_flops if self.matmul_flops else None,
            **{f"{name}_ms": value / max(1, self.steps) * 1e3 for name, value in self.phases.items()},
        }
        self.steps, self.seconds, self.phases = 0, 0.0, {}
        return rates
