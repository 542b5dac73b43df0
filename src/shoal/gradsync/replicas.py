"""Work of replicas after an optimiser step: the interface, and that of synchronous replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from shoal.config.sections import Config
from shoal.gradsync.exchange import Traffic
from shoal.runtime.log import log
from shoal.runtime.rank_info import ReplicaGroupInfo


@dataclass(frozen=True)
class Update:
    """Optimiser of the run for some weights."""

    step: Callable[[float], None]  # at a learning rate
    state: Callable[[], dict[str, Tensor]]  # by parameter name and key; made where it is not yet there


@dataclass(frozen=True)
class Replica:
    """Arguments of a strategy for replica groups: the replica of this rank, and its optimiser."""

    config: Config
    weights: dict[str, nn.Parameter]  # this rank's, by name
    update: Update  # of all of these
    update_of: Callable[[dict[str, nn.Parameter]], Update]  # makes one of its own for some weights
    rate_at: Callable[[int], float]  # a step's learning rate, as a share of its peak
    num_replicas: int
    rank: int  # within the replica
    group: ReplicaGroupInfo | None  # None: the only one
    fingerprints: Sequence[str]  # of the datasets
    stopped: Callable[[], bool]  # whether this rank was asked to end
    record: Callable[..., None]  # takes a step, and facts of an exchange
    incidents: Path | None  # None on all ranks but one


class SynchronousReplicas:
    """Replicas that take the same step, so that nothing is left to do after it.

    Other strategies override the methods that they need.
    """

    traffic: Traffic | None = None  # what this rank has sent to agree, where it is counted
    figures: Mapping[str, float] = MappingProxyType({})  # what there is to record of the last step
    kinds: tuple[str, ...] = ()  # of tensors with the names of weights, as kind.parameter
    saves = True  # this replica's state is the run's, and begins with what a checkpoint holds

    def start(self, step: int) -> int:
        """Begin after `step` steps; return the step to continue from. Collective over the replicas."""
        return step

    def take_step(self, step: Callable[[float], None], rate: float) -> None:
        """Update the weights by their gradients at a learning rate, by calling `step` or in another way."""
        step(rate)

    def after_step(self, step: int) -> None:
        """Do what follows a step that this replica took or skipped. Collective over the replicas."""

    def stopping(self, step: int, *, asked: bool) -> bool:
        """Return whether to stop after a step; `asked` is whether this replica has a stop request."""
        return asked

    def close(self) -> None:
        """Leave the replicas. Called after the last save."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint without tensors, as JSON values."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint, cut like the weights, by `kind.parameter`."""
        return {}

    def expect(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to fill from a checkpoint with this `state`; empty if it has none."""
        if "inner" in state:
            held = f"{state['strategy']}, inner layout {state['inner']}"
            log.info(f"gradients that were held back are dropped: {held} then, none held now")
        return {}


class WeightOwners(SynchronousReplicas, ABC):
    """Replicas in which one rank updates a weight for all."""

    @property
    @abstractmethod
    def owned(self) -> dict[str, nn.Parameter]:
        """The weights that this rank updates."""

    @abstractmethod
    def run(self) -> None:
        """Sum each gradient on its owner. Collective over all ranks."""
