"""Error feedback of an exchange in a checkpoint, under names that any number of replicas can load.

Tensors of one replica are named `sync/replica-1.part-0.residual.<parameter>`, tensors that are the same on
all replicas `sync/part-0.q.<parameter>`. A part is one of the ranks that together hold a replica.
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

_MAX_REPLICAS = 10_000  # a checkpoint of Shoal never has more


class FeedbackState(SynchronousReplicas):
    """Error feedback of one rank. No method communicates."""

    def __init__(self, exchange: Exchange, mesh: Mesh, split: tuple[int, ...]) -> None:
        """Build from a rank's exchange and mesh; `split` is the layers of each pipeline stage, if given."""
        self._exchange = exchange
        self.traffic = exchange.traffic
        self._mesh = mesh
        self._inner = " ".join(map(str, (replace(mesh.layout, dp_replicate=1), *split)))
        self._added: list[tuple[Tensor, Tensor]] = []

    def start(self, step: int) -> int:
        """Add the error feedback of replicas that no longer exist to that of this replica."""
        for own, more in self._added:
            own += more
        self._added.clear()
        return step

    def state(self) -> dict[str, Any]:
        """Return the strategy and layout that can load the tensors; empty if there are none."""
        if not self.tensors():
            return {}
        replicas = self._mesh.layout.dp_replicate
        return {"strategy": self._exchange.name, "replicas": replicas, "inner": self._inner}

    def tensors(self) -> dict[str, Tensor]:
        return self._of_replica(self._mesh.replica, self._exchange.state()) | self._common()

    def expect(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to fill from a checkpoint with this state; call `start` afterwards.

        With another number n of replicas, replica r takes over the error feedback of replicas r, r + n, r +
        2n and so on, which keeps the sum. That of another strategy or layout is dropped.
        """
        state = state if "inner" in state else {}  # of replica groups, which have no error feedback
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
