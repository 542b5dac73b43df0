"""What training asks of a model, or of the part of one that a process holds."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Part(nn.Module, ABC):
    """A whole model, or some of its successive layers."""

    is_first = is_last = True

    @abstractmethod
    def initial_std(self, name: str) -> float:
        """Return the standard deviation of a weight's initial values."""

    @abstractmethod
    def smallest_call(self, device: torch.device) -> dict[str, Tensor]:
        """Return arguments of the smallest forward pass."""

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names they have in the whole model."""
        return dict(self.named_parameters())

    def rows_in_use(self, name: str) -> int | None:
        """Return how many rows of a weight are in use; the padding after them begins as 0. None: all are."""
        return None

    def running_statistics(self) -> dict[str, Tensor]:
        """Return what normalisation has gathered for evaluation, by name; each replica gathers its own."""
        return {}
