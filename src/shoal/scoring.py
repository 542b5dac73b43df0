"""Loss and perplexity of a model on batches of tokens; used by training and by inference."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def loss_sum(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Return the summed cross entropy in nats, fp32; padded columns of the logits are -inf."""
    return F.cross_entropy(logits_btv.float().flatten(0, 1), targets_bt.flatten(), reduction="sum")


def perplexity(loss: float) -> float:
    """Return exp(mean loss in nats per token); infinite where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf
