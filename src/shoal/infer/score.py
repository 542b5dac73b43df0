"""How likely a model finds given tokens: the one measure behind every evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.models.decoder import Decoder
from shoal.models.loss import row_losses

_POSITIONS = 1024  # whose logits are there at a time


@dataclass(frozen=True)
class Span:
    """Tokens of which those from `first` on are scored, each given all before it; `first` is at least 1."""

    tokens: NDArray[np.integer] | Sequence[int]
    first: int


@dataclass(frozen=True)
class Score:
    """The summed loss of a span in nats, and whether each of its tokens was the likeliest."""

    loss: float
    greedy: bool


def sliding_spans(tokens: NDArray[np.integer], seq_len: int, stride: int) -> list[Span]:
    """Cut tokens into windows of `seq_len` inputs, `stride` apart, that score each token but the first once.

    The first window scores all its targets, a later one those that no window before it has seen: with stride
    1 each token has `seq_len` tokens before it, or all there are.
    """
    assert 1 <= stride <= seq_len, (stride, seq_len)
    spans, scored = [], 1
    for start in range(0, max(1, len(tokens) - 1), stride):
        end = min(start + seq_len + 1, len(tokens))
        if end > scored:
            spans.append(Span(tokens[start:end], scored - start))
            scored = end
    return spans


@torch.inference_mode()
def score(model: Decoder, spans: Sequence[Span]) -> list[Score]:
    """Score one batch of spans, computed together."""
    assert model.head is not None, "only whole models score"
    device = model.head.weight.device
    lengths = [len(span.tokens) for span in spans]
    padded = np.zeros((len(spans), max(lengths)), dtype=np.int64)  # at the right: nothing before it sees it
    wanted = np.zeros(padded.shape, dtype=bool)
    for row, span in enumerate(spans):
        padded[row, : lengths[row]] = span.tokens
        wanted[row, span.first : lengths[row]] = True
    tokens_bt = torch.from_numpy(padded).to(device)
    wanted_bt = torch.from_numpy(wanted).to(device)[:, 1:]
    x_nd = model.hidden(tokens_bt[:, :-1])[wanted_bt]
    targets_n, rows_n = tokens_bt[:, 1:][wanted_bt], wanted_bt.nonzero()[:, 0]
    losses = torch.zeros(len(spans), dtype=torch.float64, device=device)
    misses = torch.zeros(len(spans), dtype=torch.long, device=device)
    for n in range(0, len(x_nd), _POSITIONS):
        part = slice(n, n + _POSITIONS)
        loss_n, likeliest_n = row_losses(model.head(x_nd[part]), targets_n[part])
        losses.index_add_(0, rows_n[part], loss_n.double())
        misses.index_add_(0, rows_n[part], (~likeliest_n).long())
    return [Score(loss, missed == 0) for loss, missed in zip(losses.tolist(), misses.tolist(), strict=True)]
