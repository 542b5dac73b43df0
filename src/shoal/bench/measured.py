"""What a training run took and sent, and how its loss fell, read from its metrics."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_START_UP = 2  # steps: memory is still being taken, buffers are made


@dataclass(frozen=True)
class Point:
    """Point of a loss curve; seconds are those of training steps alone."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class MeasuredRun:
    """A run, step by step as rank 0 saw it."""

    step_s: list[float]
    communication_s: list[float]  # waits; exchanges beside the backward pass cost none
    sync_bytes: list[float] | None  # sent for the agreement; None where nobody knows
    counted: bool  # else by formula
    curve: list[Point]  # from the first loss, before any training, over all validations
    skip: int  # first steps that do not count
    period: int = 1  # steps after which all repeats: 1, those between two agreements, or 0 for never
    rounds: list[dict[str, Any]] = field(default_factory=list)  # of replicas that train apart

    @property
    def seconds_a_step(self) -> float:
        """The median over whole periods of a period's mean; where nothing repeats, the mean."""
        return statistics.median(statistics.fmean(part) for part in self._periods(self.step_s))

    @property
    def bytes_a_step(self) -> float | None:
        """Bytes that rank 0 sent in a step, over whole periods."""
        if self.sync_bytes is None:
            return None
        return statistics.fmean(itertools.chain(*self._periods(self.sync_bytes)))

    @property
    def communication_share(self) -> float:
        """Part of the time in which rank 0 waited for others."""
        waited, whole = (sum(map(sum, self._periods(p))) for p in (self.communication_s, self.step_s))
        return waited / whole

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return self.curve[-1].seconds

    def loss_after(self, seconds: float) -> float:
        """Return the loss after so many seconds of training, on straight lines between validations."""
        for before, after in itertools.pairwise(self.curve):
            if seconds <= after.seconds:
                share = (seconds - before.seconds) / (after.seconds - before.seconds)
                return before.loss + share * (after.loss - before.loss)
        return self.curve[-1].loss

    def _periods(self, values: Sequence[float]) -> list[Sequence[float]]:
        counted = values[self.skip :]
        count = len(counted) // self.period if self.period else 0
        return [counted[n * self.period : (n + 1) * self.period] for n in range(count)] or [counted]


def measured(
    lines: Sequence[dict[str, Any]],
    *,
    warmup_steps: int = 0,
    period: int = 1,
    by_formula: float | None = None,
) -> MeasuredRun:
    """Read the lines of metrics.jsonl; `by_formula` are the bytes a step where nobody counted them."""
    steps = [line for line in lines if "seconds" in line]
    took = list(itertools.accumulate((line["seconds"] for line in steps), initial=0.0))
    counted = all("sync_bytes" in line for line in steps)
    guessed = None if by_formula is None else [by_formula] * len(steps)
    return MeasuredRun(
        step_s=[line["seconds"] for line in steps],
        communication_s=[line["communication_s"] for line in steps],
        sync_bytes=[line["sync_bytes"] for line in steps] if counted else guessed,
        counted=counted,
        curve=[Point(0, 0.0, steps[0]["loss"])]
        + [
            Point(line["step"], took[line["step"]], line["validation_loss"])
            for line in lines
            if "validation_loss" in line
        ],
        skip=min(max(_START_UP, warmup_steps), len(steps) - 1),
        period=period,
        rounds=[line for line in lines if "round" in line],
    )
