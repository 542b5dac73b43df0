"""Loss and perplexity of a model on batches of tokens; used by training and by inference."""

from __future__ import annotations

import math

from torch import Tensor

from shoal.models.loss import CrossEntropy


def loss_sum(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Return the summed cross entropy in nats, fp32; padded columns of the logits are -inf."""
    return CrossEntropy()(logits_btv, targets_bt)


def perplexity(loss: float) -> float:
    """Return exp(mean loss in nats per token); infinite where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf
