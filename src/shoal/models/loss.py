"""Cross entropy over a large vocabulary without fp32 copies of the logits.

torch's own keeps fp32 logits, their log-softmax and two gradients of that size at once. Here the logits are
all there is: the backward pass turns them into their own gradient, some rows at a time, in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}  # 4 MB stays in a core's cache; a GPU wants few launches


class Columns(Protocol):
    """The columns of the logits that this process holds, where several share the vocabulary."""

    first: int

    def gather(self, x: Tensor) -> Tensor:
        """Return every process's `x`, stacked along a new first dim. Collective over them."""


class CrossEntropy:
    """Cross entropy summed over rows, of whole logits or of the columns that each process holds."""

    def __init__(self, columns: Columns | None = None, *, compiled: bool = False) -> None:
        self.columns = columns
        self.log_total: Callable[[Tensor], Tensor] = _log_total
        self.to_gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = _to_gradient
        if compiled:
            self.log_total = torch.compile(_log_total, dynamic=False)
            self.to_gradient = torch.compile(_to_gradient, dynamic=False)

    def __call__(self, logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
        """Return the sum in nats, fp32; every target is a valid id of the whole vocabulary.

        Columns of -inf (padded vocabulary) take no probability and get a gradient of exactly 0. Backward
        overwrites the logits.
        """
        loss: Tensor = _CrossEntropySum.apply(logits_btv.flatten(0, -2), targets_bt.flatten(), self)
        return loss

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of all columns, fp32. Collective over the processes that share the vocabulary."""
        if self.columns is None:
            return logits.float()
        return self.columns.gather(logits.float()).movedim(0, -2).flatten(-2)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, targets_n: Tensor, how: CrossEntropy) -> Tensor:
        log_total_n = torch.empty(len(targets_n), dtype=torch.float32, device=logits_nv.device)
        log_total = how.log_total if ctx.needs_input_grad[0] else _log_total  # evaluation has other shapes
        for rows in row_chunks(logits_nv):
            log_total_n[rows] = log_total(logits_nv[rows])
        first = how.columns.first if how.columns else 0
        column_n = targets_n - first
        held_n = (column_n >= 0) & (column_n < logits_nv.shape[1])
        column_n = column_n.where(held_n, 0)
        picked_n = logits_nv.gather(1, column_n[:, None]).squeeze(1).float().where(held_n, 0.0)
        if how.columns is not None:
            both_p2n = how.columns.gather(torch.stack((log_total_n, picked_n)))
            log_total_n, picked_n = both_p2n[:, 0].logsumexp(dim=0), both_p2n[:, 1].sum(dim=0)
        ctx.save_for_backward(logits_nv, column_n, held_n, picked_n, log_total_n)
        ctx.how = how
        return (log_total_n - picked_n).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_nv, column_n, held_n, picked_n, log_total_n = ctx.saved_tensors
        for rows in row_chunks(logits_nv):
            ctx.how.to_gradient(logits_nv[rows], log_total_n[rows], grads[0])
        # The target's own, softmax - 1, is small where the model is right: worked out before any rounding.
        target_n = ((picked_n - log_total_n).expm1() * grads[0]).to(logits_nv.dtype)
        # Not scatter_, which on a CPU makes two copies of all logits.
        places = torch.arange(len(column_n), device=column_n.device), column_n
        logits_nv[places] = target_n.where(held_n, logits_nv[places])
        return logits_nv, None, None


def row_losses(logits_nv: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss in nats, fp32 [n], and whether its target is the likeliest, the first of equals.

    No copy of the logits is made, and the slow search for the place of the largest one only where the target
    is as large.
    """
    losses_n = torch.empty(len(targets_n), dtype=torch.float32, device=logits_nv.device)
    likeliest_n = torch.zeros(len(targets_n), dtype=torch.bool, device=logits_nv.device)
    picked_n = logits_nv.gather(1, targets_n[:, None]).squeeze(1)
    for rows in row_chunks(logits_nv):
        part_nv, picked = logits_nv[rows], picked_n[rows]
        losses_n[rows] = _log_total(part_nv) - picked.float()
        likely = (picked >= part_nv.amax(dim=-1)).nonzero().squeeze(1)
        likeliest_n[rows.start + likely] = part_nv[likely].argmax(dim=-1) == targets_n[rows][likely]
    return losses_n, likeliest_n


def _log_total(logits_nv: Tensor) -> Tensor:
    return logits_nv.float().logsumexp(dim=-1)


def _to_gradient(logits_nv: Tensor, log_total_n: Tensor, factor: Tensor) -> Tensor:
    """Turn logits into factor * softmax, in place."""
    return logits_nv.copy_((logits_nv - log_total_n[:, None]).exp_().mul_(factor))


def row_chunks(logits_nv: Tensor) -> Iterator[slice]:
    """Return the rows that are worked on at a time."""
    num_rows, vocab_size = logits_nv.shape
    fit = max(1, _CHUNK_ELEMENTS[logits_nv.device.type] // vocab_size)
    size = 1 << (fit.bit_length() - 1)  # a power of two leaves no smaller last chunk, to be compiled as well
    return (slice(first, first + size) for first in range(0, num_rows, size))
