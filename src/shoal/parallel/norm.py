"""Gradient norm of a model in any layout."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.runtime.mesh import local_gradient


class GradientNorm:
    """This rank's part of the squared norm. A gradient that several ranks hold counts once."""

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        *,
        is_partial: bool,
        copies: int = 1,
        duplicates: Set[str] = frozenset(),
    ) -> None:
        """Take this rank's weights, each held whole or in part by `copies` ranks; others count `duplicates`.

        With `is_partial`, this rank has only a part of the gradients.
        """
        self.is_partial = is_partial
        self._weights = list(weights.values())
        shares = [0.0 if name in duplicates else _cuts(weight) / copies for name, weight in weights.items()]
        self._shares = torch.tensor(shares, dtype=torch.float64)

    def squares(self) -> Tensor:
        """Return the sum of squares that this rank counts, in float64, on the device of the gradients."""
        if not self._weights:
            return torch.zeros((), dtype=torch.float64)
        norms = torch.stack(
            torch._foreach_norm([local_gradient(weight) for weight in self._weights])
        ).double()
        self._shares = self._shares.to(norms.device)
        return (norms.square() * self._shares).sum()


def _cuts(weight: nn.Parameter) -> int:
    """Return the number of ranks over which a parameter is cut."""
    if not isinstance(weight, DTensor):
        return 1
    mesh, cuts = weight.device_mesh, 1
    for axis, placement in enumerate(weight.placements):
        cuts *= 1 if placement.is_replicate() else mesh.size(axis)
    return cuts
