"""When a difference is rounding and when it is a bug.

The reference is trained again with its additions in another order. What that changes, times a safety factor,
is the floor of each tensor and each curve: a layout that stays below it is right as far as numbers can tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.config.layout import Layout
from shoal.parity.trial import Distance, TrialResult

FACTOR = 8.0  # a floor is that many times the largest difference that another order of additions made
ULPS = 4.0  # and at least so many units in the last place of fp32
ULP = 2.0**-23
GRADIENT = 1e-5  # of a tensor's norm: a gradient of step 1 may always differ so much
CURVE = 2e-6  # the same of losses, gradient norms and the size of what a module puts out
MOVED = 1e-2  # of the distance that a weight went: Adam makes much of gradients that are almost zero

TENSORS = ("start", "gradient", "weight")
CURVES = ("loss", "norm", "validation", "output")
_AXES = {"dp": "data parallelism", "zero": "ZeRO", "tp": "tensor parallelism", "pp": "the pipeline"}


@dataclass(frozen=True)
class Difference:
    """The difference of one thing from the reference's, and what is allowed."""

    kind: str  # of TENSORS or CURVES
    name: str  # of the tensor or module; the step of a loss or norm
    rank: int  # where it is largest
    difference: float
    base: float  # what it is a part of: the reference's norm or value, or the distance a weight went
    floor: float
    limit: float
    share: float = 1.0

    @property
    def parts_ways(self) -> bool:
        return not self.difference <= self.limit

    def relative(self, value: float) -> float:
        """Return a value as a part of the base."""
        if value == 0.0:
            return 0.0
        return value / self.base if self.base else math.inf


class Judge:
    """Knows the reference and its floors."""

    def __init__(
        self, order: Sequence[str], reference: list[TrialResult], reordered: list[list[TrialResult]]
    ) -> None:
        """Take the names of all tensors in model order and what each rank of each run saw."""
        self._order = order
        self._curves = _curves(reference[0])
        self._tensors: dict[str, dict[str, Distance]] = {kind: {} for kind in (*TENSORS, "moved")}
        for outcome in reference:
            for kind, found in outcome.tensors.items():
                self._tensors[kind].update(found)
        self._floors = {kind: dict.fromkeys(order, 0.0) for kind in TENSORS}
        self.curve_floors = dict.fromkeys(CURVES, 0.0)
        for finding in (f for ranks in reordered for f in self.findings(ranks)):
            if finding.kind in CURVES:
                floor = FACTOR * finding.relative(finding.difference)
                self.curve_floors[finding.kind] = max(floor, self.curve_floors[finding.kind])
            else:
                floors = self._floors[finding.kind]
                floors[finding.name] = max(FACTOR * finding.difference, floors[finding.name])
        self.below_floor = [
            name for name in order if self._tensors["gradient"][name].norm <= self._floors["gradient"][name]
        ]

    def findings(self, ranks: list[TrialResult]) -> list[Difference]:
        """Compare a run: tensors in model order, then losses, norms, validation; of all ranks the worst."""
        found = [
            self._tensor(kind, name, [outcome.tensors[kind].get(name) for outcome in ranks])
            for kind in TENSORS
            for name in self._order
        ]
        return found + list(self._curve_findings([_curves(outcome) for outcome in ranks]))

    def _tensor(self, kind: str, name: str, seen: list[Distance | None]) -> Difference:
        rank, worst = max(
            ((rank, distance) for rank, distance in enumerate(seen) if distance is not None),
            key=lambda item: item[1].difference,
            default=(0, Distance(math.inf, 0.0)),  # no rank has it
        )
        norm = self._tensors[kind][name].norm
        floor = max(self._floors[kind][name], ULPS * ULP * norm)
        base = self._tensors["moved"][name].norm if kind == "weight" else norm
        allowed = {"start": 0.0, "gradient": GRADIENT, "weight": MOVED}[kind] * base
        floor = 0.0 if kind == "start" else floor
        return Difference(kind, name, rank, worst.difference, base, floor, max(floor, allowed), worst.share)

    def _curve_findings(self, ranks: list[dict[str, dict[str, float]]]) -> Iterator[Difference]:
        for kind, curve in self._curves.items():
            floor = self.curve_floors[kind]
            for name, value in curve.items():
                gaps = [_gap(curves[kind][name], value) for curves in ranks]
                rank = max(range(len(gaps)), key=gaps.__getitem__)
                base = abs(value)
                yield Difference(kind, name, rank, gaps[rank], base, floor * base, max(floor, CURVE) * base)


@dataclass(frozen=True)
class LayoutResult:
    """What was found about a layout."""

    layout: Layout
    findings: list[Difference]
    apart: Sequence[str]  # tensors whose gradient is zero but for rounding
    suspect: str  # what of the layout is wrong; empty where nothing is
    seconds: float

    @property
    def is_bug(self) -> bool:
        return any(finding.parts_ways for finding in self.findings)

    @property
    def first(self) -> Difference | None:
        """Return what parts ways first in the order of a step: outputs come before gradients."""
        for kind in ("start", "output", "gradient", "weight"):
            if wrong := [f for f in self.findings if f.kind == kind and f.parts_ways]:
                return wrong[-1 if kind == "gradient" else 0]
        return None

    def worst(self, kind: str) -> Difference | None:
        """Return the largest relative difference of a kind; of the tensors apart only if they part ways."""
        found = [f for f in self.findings if f.kind == kind and (f.parts_ways or f.name not in self.apart)]
        return max(found, key=lambda f: f.relative(f.difference), default=None)

    def sentence(self) -> str:
        """Say it in words."""
        return self._bug() if self.is_bug else self._rounding()

    def _rounding(self) -> str:
        gradients = [f for f in self.findings if f.kind == "gradient" and f.name not in self.apart]
        small = [f for f in gradients if f.difference <= GRADIENT * f.base]
        words = f"{self.layout}: rounding. Losses differ by at most {_part(self.worst('loss'))}"
        if small:
            largest = max(small, key=lambda f: f.relative(f.difference))
            words += f", gradients of step 1 by {_part(largest)} of a tensor's norm ({largest.name})"
        if len(small) < len(gradients):
            words += f"; {len(gradients) - len(small)} by more, but by less than their floor"
        return words + "."

    def _bug(self) -> str:
        words = f"{self.layout}: a bug, {self.suspect}."
        if (first := self.first) is not None:
            words += self._name(first)
        for kind, name in (("loss", "loss"), ("norm", "gradient norm"), ("validation", "validation loss")):
            wrong = next((f for f in self.findings if f.kind == kind and f.parts_ways), None)
            if wrong is not None:
                where = "" if kind == "validation" else f" of step {wrong.name}"
                allowed = f"allowed {wrong.relative(wrong.limit):.1e}"
                words += f" The {name}{where} differs by {_part(wrong)} ({allowed})"
                words += ": the forward pass is at fault." if (kind, wrong.name) == ("loss", "1") else "."
        return words

    def _name(self, first: Difference) -> str:
        sizes = f"(floor {first.relative(first.floor):.1e}, allowed {first.relative(first.limit):.1e})"
        if first.kind == "output":
            words = f" The forward pass of step 1 parts ways in {first.name}: the size of what it puts out "
            return words + f"differs by {_part(first)} {sizes}."
        what, of = {
            "start": ("initial weight", "its norm"),
            "gradient": ("gradient of step 1, in the order of the backward pass,", "its norm"),
            "weight": ("weight after the last step", "the way that it went"),
        }[first.kind]
        same = [f.parts_ways for f in self.findings if f.kind == first.kind]
        words = (
            f" The first {what} that parts ways is {first.name}, on rank {first.rank}: it differs by "
            f"{_part(first)} of {of} {sizes}; so do {sum(same) - 1} more of {len(same)}."
        )
        if first.kind == "gradient" and math.isfinite(first.share) and abs(first.share - 1) > 0.01:
            words += f" It holds {first.share:.2f} of what it should."
        return words


def axis_of(word: str) -> str:
    """Return what a layout word does: tp2 is tensor parallelism."""
    return next(axis for start, axis in _AXES.items() if word.startswith(start))


def _curves(outcome: TrialResult) -> dict[str, dict[str, float]]:
    """Return each kind of CURVES as {name: value}."""
    losses, norms = (
        {str(step): value for step, value in enumerate(values, start=1)}
        for values in (outcome.losses, outcome.norms)
    )
    validation = {} if outcome.validation is None else {"end": outcome.validation}
    return dict(zip(CURVES, (losses, norms, validation, outcome.outputs), strict=True))


def _gap(value: float, reference: float) -> float:
    gap = abs(value - reference)
    return gap if math.isfinite(gap) else math.inf


def _part(finding: Difference | None) -> str:
    return "nothing" if finding is None else f"{finding.relative(finding.difference):.1e}"
