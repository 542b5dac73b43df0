"""Tensors that a strategy keeps from step to step."""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """Named tensors that change with a step if it is taken, and not at all if it is left out.

    Each takes its memory twice: as it is, and as it will be.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._next: dict[str, Tensor] = {}  # written in this step
        self._spare: dict[str, Tensor] = {}

    def write(self, name: str, value: Tensor) -> None:
        """Say what a tensor will be once the step is taken."""
        new = self._spare.pop(name, None)
        self._next[name] = (torch.empty_like(self.tensors[name]) if new is None else new).copy_(value)

    def settle(self, *, applied: bool) -> None:
        """End a step."""
        for name, new in self._next.items():
            if applied:
                new, self.tensors[name] = self.tensors[name], new
            self._spare[name] = new
        self._next.clear()
