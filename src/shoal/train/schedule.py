"""The learning rate of a step."""

from __future__ import annotations

import math

from shoal.config.sections import Config


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of optimiser step `step` (1-based): linear warm-up, cosine to min_lr, then min_lr.

    The last warm-up step and the next one have the peak; step decay_steps has min_lr.
    """
    peak, low = config.optimizer.lr, config.schedule.min_lr
    warmup, end = config.schedule.warmup_steps, config.schedule.decay_steps or config.train.steps
    if step <= warmup:
        return peak * step / warmup
    if step >= end:
        return low
    progress = (step - warmup) / (end - warmup)
    return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
