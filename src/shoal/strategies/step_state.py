"""State of a strategy that a skipped step leaves unchanged."""

from __future__ import annotations

import torch
from torch import Tensor


class StepState:
    """Named tensors whose new values count once the step is applied, and are dropped if it is skipped.

    Takes the memory of each tensor twice, for the current value and the next one.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._next: dict[str, Tensor] = {}  # written in this step
        self._spare: dict[str, Tensor] = {}

    def write(self, name: str, value: Tensor) -> None:
        """Set the value of a tensor for when the step is applied."""
        new = self._spare.pop(name, None)
        self._next[name] = (torch.empty_like(self.tensors[name]) if new is None else new).copy_(value)

    def settle(self, *, applied: bool) -> None:
        """End a step: apply or drop what was written."""
        for name, new in self._next.items():
            if applied:
                new, self.tensors[name] = self.tensors[name], new
            self._spare[name] = new
        self._next.clear()
