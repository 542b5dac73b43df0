"""The one gradient norm of a model, however it is cut."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.gradsync.after_backward import local_gradient
from shoal.runtime.mesh import Mesh
from shoal.runtime.process import Process


class GradientNorm:
    """Adds up the squares of every rank's parts; what several ranks hold alike counts once."""

    def __init__(
        self, weights: dict[str, nn.Parameter], elsewhere: set[str], mesh: Mesh, process: Process
    ) -> None:
        """Take this rank's weights; those named in `elsewhere` are counted by other ranks."""
        self._weights = list(weights.values())
        self._process = process if mesh.axes is not None else None  # replicas hold all gradients alike
        copies = mesh.layout.dp * mesh.layout.tp if self._process else 1
        shares = [0.0 if name in elsewhere else _cuts(weight) / copies for name, weight in weights.items()]
        self._shares = torch.tensor(shares, dtype=torch.float64)

    def __call__(self) -> float:
        """Return the norm of all gradients. Collective over the world, if anything is cut."""
        gradients = [local_gradient(weight) for weight in self._weights]
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
