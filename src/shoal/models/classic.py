"""Classic networks: small, of fixed form, and replicated whole. Shape and initial weights are their own.

FCN-R and LSTM are those of S. Shi and others, "Benchmarking State-of-the-Art Deep Learning Software Tools"
(2016). Tensor names: n samples, d features, t steps, c classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

_EMBEDDED, _HIDDEN, _LAYERS = 256, 256, 2  # of the LSTM
WIDTHS = (2048, 4096, 1024)  # of FCN-R's hidden layers


class Classic(nn.Module, ABC):
    """What training asks of a network that is not cut: it is the first part and the last."""

    is_first = is_last = True

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name."""
        return dict(self.named_parameters())

    def initial_std(self, name: str) -> float:
        """Return the deviation of a matrix's first values: Glorot and Bengio, 2010; embeddings as GPT-2's."""
        rows, columns = self.get_parameter(name).shape
        return 0.02 if name.startswith("embed") else math.sqrt(2 / (rows + columns))

    def rows_in_use(self, name: str) -> int | None:
        """Return None: nothing is padded."""
        return None

    @abstractmethod
    def smallest_call(self, device: torch.device) -> dict[str, Tensor]:
        """Return arguments of the smallest forward pass."""

    @property
    def flops_per_target(self) -> int:
        """Operations for a target, forward and backward: 6 for each number of a matrix that is multiplied."""
        weights = self.named_weights().items()
        return 6 * sum(w.numel() for name, w in weights if w.ndim == 2 and not name.startswith("embed"))


class FullyConnected(Classic):
    """FCN-R: sigmoid layers of 2048, 4096 and 1024 between the features and the classes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        widths = (features, *WIDTHS)
        self.hidden = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        self.head = nn.Linear(widths[-1], classes)

    def initial_std(self, name: str) -> float:
        """Return four times as much before a sigmoid as before a tanh, which is four times as steep."""
        return super().initial_std(name) * (4 if name.startswith("hidden") else 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [samples, classes] of samples of any shape."""
        x_nd = inputs.flatten(1)
        for layer in self.hidden:
            x_nd = layer(x_nd).sigmoid()
        return self.head(x_nd)

    def smallest_call(self, device: torch.device) -> dict[str, Tensor]:
        """Return arguments for one sample."""
        first = self.hidden[0]
        assert isinstance(first, nn.Linear)
        return {"inputs": torch.zeros(1, first.in_features, device=device)}


class Lstm(Classic):
    """Two LSTM layers of 256 over embeddings of 256; each step of a sequence predicts the next token."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, _EMBEDDED)
        self.lstm = nn.LSTM(_EMBEDDED, _HIDDEN, _LAYERS, batch_first=True)
        self.head = nn.Linear(_HIDDEN, vocab_size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [samples, steps, vocabulary] of tokens [samples, steps]; each begins in state 0."""
        x_ntd, _ = self.lstm(self.embed(inputs))
        return self.head(x_ntd)

    def smallest_call(self, device: torch.device) -> dict[str, Tensor]:
        """Return arguments for one token."""
        return {"inputs": torch.zeros(1, 1, dtype=torch.long, device=device)}
