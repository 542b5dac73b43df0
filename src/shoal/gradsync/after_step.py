"""What replicas have to do for each other once an optimiser step is taken."""

from __future__ import annotations

from typing import Protocol


class AfterStep(Protocol):
    """A strategy's part after the optimiser step."""

    def after_step(self, step: int) -> None:
        """Follow a step that all ranks have taken. Collective over the replicas."""


class InStep:
    """Replicas that take the same step need nothing."""

    def after_step(self, step: int) -> None:
        """Do nothing."""
