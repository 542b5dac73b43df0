"""Memory of each rank by category over a step (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

CATEGORIES = (
    "weights",
    "master_weights",
    "gradients",
    "optimizer",
    "layer_inputs",
    "activations",
    "logits",
    "communication",
    "pipeline",
    "offload",
    "reserve",
    "context",
)
_BETWEEN_STEPS = ("weights", "master_weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Moment:
    """Bytes on the device at one moment of a step."""

    name: str
    bytes: dict[str, int]  # by category

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class RankMemory:
    """Memory of the ranks at one place of the pipeline."""

    pp_rank: int
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The moment with most bytes."""
        return max(self.moments, key=lambda moment: moment.total)
