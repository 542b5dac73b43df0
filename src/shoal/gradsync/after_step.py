"""What replicas have to do for each other once an optimiser step is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from shoal.comm.transport import Traffic


@dataclass(frozen=True)
class Update:
    """The run's optimiser for some weights."""

    step: Callable[[float], None]  # at a learning rate
    state: Callable[[], dict[str, Tensor]]  # by parameter name and key; made where it is not yet there


class InStep:
    """Replicas that take the same step need nothing. Strategies after the step replace what they need."""

    traffic: Traffic | None = None  # what this rank has sent to agree, where it is counted
    figures: Mapping[str, float] = MappingProxyType({})  # what there is to record of the last step
    saves = True  # this replica's state is the run's, and begins with what a checkpoint holds

    def start(self, step: int) -> int:
        """Begin when `step` steps are done here; return how many are then. Collective over the replicas."""
        return step

    def take_step(self, step: Callable[[float], None], rate: float) -> None:
        """Have the weights updated by their gradients, by `step` or by others, at a learning rate."""
        step(rate)

    def after_step(self, step: int) -> None:
        """Follow a step that this replica has taken, or left out. Collective over the replicas."""

    def stopping(self, step: int, *, asked: bool) -> bool:
        """Say whether to stop after a step; `asked` is whether this replica was told to."""
        return asked

    def close(self) -> None:
        """Take part no more. Called when all that is to be saved has been."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep beside tensors, as JSON values."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint has to keep, cut like the weights, as kind.parameter."""
        return {}

    def expect(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to fill from a checkpoint with this `state`; empty: it has none to give."""
        return {}
