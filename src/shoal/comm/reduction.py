"""What a reduction does with the tensors of the ranks, two at a time."""

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
    """A commutative operation; each result is rounded to the tensors' own format."""

    def __init__(self, name: str, dtype: torch.dtype, size: int) -> None:
        """Take one of NAMES, the format of the tensors, and the number of ranks, which divides an average.

        Raises:
            InputError: There is no such operation, or not for this format.
        """
        if name not in _INTO:
            raise InputError(f"there is no reduction {name!r}", hint=f"choose from {', '.join(NAMES)}")
        if name == "average" and not (dtype.is_floating_point or dtype.is_complex):
            raise InputError(f"{dtype} has no average", hint="use sum, or a floating-point format")
        self.into = _INTO[name]
        self._divisor = size if name == "average" else 1

    def finish(self, total: Tensor) -> None:
        """Turn what all ranks' tensors came to into the result, in place. The sum of an average must fit."""
        if self._divisor > 1:
            total.div_(self._divisor)
