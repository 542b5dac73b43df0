"""The error feedback of an exchange in a checkpoint, under names that other numbers of replicas can read.

Tensors of a replica are `sync/replica-1.part-0.residual.<parameter>`, those that all replicas have alike
`sync/part-0.q.<parameter>`; a part is one of the ranks that hold a replica together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.gradsync.exchange import Exchange
from shoal.gradsync.replicas import SynchronousReplicas
from shoal.runtime.log import log
from shoal.runtime.mesh import Mesh

_MAX_REPLICAS = 10_000  # more are no checkpoint's of ours


class FeedbackState(SynchronousReplicas):
    """The error feedback of one rank; no method communicates."""

    def __init__(self, exchange: Exchange, mesh: Mesh, split: tuple[int, ...]) -> None:
        """Take a rank's exchange and place; `split` is the layers of each pipeline part, if given."""
        self._exchange = exchange
        self.traffic = exchange.traffic
        self._mesh = mesh
        self._inner = " ".join(map(str, (replace(mesh.layout, dp_replicate=1), *split)))
        self._added: list[tuple[Tensor, Tensor]] = []

    def start(self, step: int) -> int:
        """Add up the error feedback of replicas that are no longer there."""
        for own, more in self._added:
            own += more
        self._added.clear()
        return step

    def state(self) -> dict[str, Any]:
        """Return what says who can read the tensors; empty where there are none."""
        if not self.tensors():
            return {}
        replicas = self._mesh.layout.dp_replicate
        return {"strategy": self._exchange.name, "replicas": replicas, "inner": self._inner}

    def tensors(self) -> dict[str, Tensor]:
        return self._of_replica(self._mesh.replica, self._exchange.state()) | self._common()

    def expect(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return what is to be filled from a checkpoint with this state; `start` follows.

        With another number of replicas, replica r takes over what replicas r, r + n, r + 2n and so on have
        not sent yet: the sum stays. What another strategy or layout held back is dropped.
        """
        state = state if "inner" in state else {}  # of replicas that train apart, which hold nothing back
        own = self._exchange.state()
        for tensor in own.values():
            tensor.zero_()
        ours = self.state()
        if any(state.get(key) != ours.get(key) for key in ("strategy", "inner")):
            log.info(f"gradients that were held back are dropped: {_told(state)} then, {_told(ours)} now")
            return {}
        if not ours:
            return {}
        asked, replicas = self._common(), int(state["replicas"])
        if replicas > _MAX_REPLICAS:
            raise ValueError(f"replicas: {replicas}")
        for replica in range(self._mesh.replica, replicas, ours["replicas"]):
            tensors = own
            if replica != self._mesh.replica:
                tensors = {name: torch.empty_like(tensor) for name, tensor in own.items()}
                self._added += [(own[name], tensor) for name, tensor in tensors.items()]
            asked |= self._of_replica(replica, tensors)
        return asked

    def _of_replica(self, replica: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        place = f"replica-{replica}.part-{self._mesh.part}"
        return {f"{place}.{name}": tensor for name, tensor in tensors.items()}

    def _common(self) -> dict[str, Tensor]:
        tensors = self._exchange.common_state().items()
        return {f"part-{self._mesh.part}.{name}": tensor for name, tensor in tensors}


def _told(facts: dict[str, Any]) -> str:
    return f"{facts['strategy']}, inner layout {facts.get('inner')}" if facts else "none held"
