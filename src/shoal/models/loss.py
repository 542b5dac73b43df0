"""Cross entropy over a large vocabulary without fp32 copies of the logits.

torch's own keeps fp32 logits, their log-softmax and two gradients of that size at once. Here logits and one
gradient in the logits' own format are all there is; the rest happens a few rows at a time, in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}  # 4 MB stays in a core's cache; a GPU wants few launches


def cross_entropy_sum(logits_nv: Tensor, targets_n: Tensor) -> Tensor:
    """Return the cross entropy summed over rows, in nats, fp32; every target is a valid id.

    Columns of -inf (padded vocabulary) take no probability and get a gradient of exactly 0.
    """
    loss: Tensor = _CrossEntropySum.apply(logits_nv, targets_n)
    return loss


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, targets_n: Tensor) -> Tensor:
        log_total_n = torch.empty(len(targets_n), dtype=torch.float32, device=logits_nv.device)
        for rows in _chunks(logits_nv):
            log_total_n[rows] = logits_nv[rows].float().logsumexp(dim=-1)
        ctx.save_for_backward(logits_nv, targets_n, log_total_n)
        return (log_total_n - logits_nv.gather(1, targets_n[:, None]).squeeze(1)).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits_nv, targets_n, log_total_n = ctx.saved_tensors
        grad_nv = torch.empty_like(logits_nv)
        for rows in _chunks(logits_nv):
            part_nv = (logits_nv[rows] - log_total_n[rows, None]).exp_()
            part_nv[torch.arange(len(part_nv), device=part_nv.device), targets_n[rows]] -= 1.0
            grad_nv[rows] = part_nv.mul_(grads[0])
        return grad_nv, None


def _chunks(logits_nv: Tensor) -> Iterator[slice]:
    num_rows, vocab_size = logits_nv.shape
    size = max(1, _CHUNK_ELEMENTS[logits_nv.device.type] // vocab_size)
    return (slice(first, first + size) for first in range(0, num_rows, size))
