"""Time, traffic and loss curve of a training run, read from its metrics."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_START_UP = 2  # first steps, which allocate memory and buffers


@dataclass(frozen=True)
class Point:
    """Point of a loss curve; seconds count training steps only, epochs are passes over the data."""

    step: int
    seconds: float
    loss: float
    epoch: float = 0.0
    accuracy: float | None = None


@dataclass(frozen=True)
class MeasuredRun:
    """Run, step by step, as recorded by rank 0."""

    step_s: list[float]
    communication_s: list[float]  # waiting; an exchange that overlaps the backward pass adds none
    sync_bytes: list[float] | None  # sent by the strategy; None if not counted
    counted: bool  # counted, else by formula
    curve: list[Point]  # the first loss, before training, then all validations
    skip: int  # first steps that are left out
    period: int = 1  # steps of a period: 1, those between two exchanges, or 0 for no period
    rounds: list[dict[str, Any]] = field(default_factory=list)  # of replica groups
    losses: list[float] = field(default_factory=list)  # of each step, on its training batch

    @property
    def seconds_a_step(self) -> float:
        """Median over whole periods of the mean in a period; without periods, the mean."""
        return statistics.median(statistics.fmean(part) for part in self._periods(self.step_s))

    @property
    def bytes_a_step(self) -> float | None:
        """Mean bytes that rank 0 sent in a step, over whole periods."""
        if self.sync_bytes is None:
            return None
        return statistics.fmean(itertools.chain(*self._periods(self.sync_bytes)))

    @property
    def communication_share(self) -> float:
        """Fraction of the time in which rank 0 waited for others."""
        waited, whole = (sum(map(sum, self._periods(p))) for p in (self.communication_s, self.step_s))
        return waited / whole

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return self.curve[-1].seconds

    def loss_after(self, seconds: float) -> float:
        """Return the loss after this many seconds of training, interpolated between validations."""
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
    steps_per_epoch: float = math.inf,
) -> MeasuredRun:
    """Read the lines of metrics.jsonl; `by_formula` is the bytes of a step if they were not counted."""
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
            Point(
                line["step"],
                took[line["step"]],
                line["validation_loss"],
                line["step"] / steps_per_epoch,
                line.get("validation_accuracy"),
            )
            for line in lines
            if "validation_loss" in line
        ],
        losses=[line["loss"] for line in steps],
        skip=min(max(_START_UP, warmup_steps), len(steps) - 1),
        period=period,
        rounds=[line for line in lines if "round" in line],
    )
