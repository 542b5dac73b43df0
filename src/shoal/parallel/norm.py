"""The one gradient norm of a model, however it is cut."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.gradsync.after_backward import local_gradient
from shoal.runtime.process import Process


class GradientNorm:
    """Adds up the squares of every rank's parts; what several ranks hold alike counts once."""

    def __init__(
        self, weights: dict[str, nn.Parameter], process: Process | None, copies: int, elsewhere: Set[str]
    ) -> None:
        """Take this rank's weights, each held alike by `copies` ranks; those of `elsewhere` others count.

        Without a process this rank holds all gradients.
        """
        self._weights = list(weights.values())
        self._process = process
        shares = [0.0 if name in elsewhere else _cuts(weight) / copies for name, weight in weights.items()]
        self._shares = torch.tensor(shares, dtype=torch.float64)

    def __call__(self) -> float:
        """Return the norm of all gradients. Collective over the world, if this rank holds a part."""
        total = 0.0
        if gradients := [local_gradient(weight) for weight in self._weights]:
            norms = torch.stack(torch._foreach_norm(gradients)).double().cpu()
            total = float((norms.square() * self._shares).sum())
        if self._process is not None:
            (total,) = self._process.sum(total)
        return float(torch.tensor(total, dtype=torch.float64).sqrt())


def _cuts(weight: nn.Parameter) -> int:
    """Return how many ranks share a parameter, each with another part."""
    if not isinstance(weight, DTensor):
        return 1
    mesh, cuts = weight.device_mesh, 1
    for axis, placement in enumerate(weight.placements):
        cuts *= 1 if placement.is_replicate() else mesh.size(axis)
    return cuts
