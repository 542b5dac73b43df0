"""Reduction operations on two tensors at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.errors import InputError

_INTO: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda total, other: total.add_(other),
    "average": lambda total, other: total.add_(other),
    "product": lambda total, other: total.mul_(other),
    "maximum": lambda total, other: torch.maximum(total, other, out=total),
    "minimum": lambda total, other: torch.minimum(total, other, out=total),
}
NAMES = tuple(_INTO)


class Reduction:
    """Commutative operation; each result is rounded to the tensors' own format."""

    def __init__(self, name: str, dtype: torch.dtype, size: int) -> None:
        """Take one of NAMES, the format of the tensors, and the number of ranks, which divides an average.

        Raises:
            InputError: The operation is unknown or does not support this format.
        """
        if name not in _INTO:
            raise InputError(f"there is no reduction {name!r}", hint=f"choose from {', '.join(NAMES)}")
        if name == "average" and not (dtype.is_floating_point or dtype.is_complex):
            raise InputError(f"{dtype} has no average", hint="use sum, or a floating-point format")
        self.into = _INTO[name]
        self._divisor = size if name == "average" else 1

    def finish(self, total: Tensor) -> None:
        """Finish a reduction over all ranks, in place. For an average, the sum must fit the format."""
        if self._divisor > 1:
            total.div_(self._divisor)
