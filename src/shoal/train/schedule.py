"""The learning rate of a step: warm-up, then one of several decays."""

from __future__ import annotations

import math
from collections.abc import Callable

from shoal.config.sections import Config, Schedule

# Each maps progress through the decay, in (0, 1), to the height above min_lr, from 1 to 0.
_SHAPES: dict[str, Callable[[float, Schedule], float]] = {
    "cosine": lambda progress, schedule: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress, schedule: 1.0 - progress,
    "wsd": lambda progress, schedule: min(1.0, (1.0 - progress) / schedule.wsd_decay_fraction),
}


def warmup_steps(config: Config) -> int:
    """Return the steps of warm-up, given as such or as a fraction of the horizon."""
    given = config.schedule.warmup_steps
    return round(config.schedule.warmup_fraction * horizon(config)) if given is None else given


def horizon(config: Config) -> int:
    """Return the step at which the decay ends."""
    return config.schedule.decay_steps or config.train.steps


def min_lr(config: Config) -> float:
    """Return the rate at the end of the decay: a tenth of the peak where none is given, as GPT-3 had it.

    (Brown et al. 2020, appendix B; also Chinchilla and LLaMA.) With 0 the last step would train nothing.
    """
    if config.schedule.min_lr is not None:
        return config.schedule.min_lr
    return config.optimizer.lr / 10 if config.schedule.kind in _SHAPES else 0.0


def learning_rate(config: Config, step: int, skipped: int = 0) -> float:
    """Return the rate of optimiser step `step` (1-based), `skipped` steps before it having been left out.

    Skipped steps matter to the megatron_* kinds only. The last warm-up step and the next one have the peak;
    the step at the horizon and all later ones have min_lr, where the kind decays to it.
    """
    peak, low, kind = config.optimizer.lr, min_lr(config), config.schedule.kind
    if kind.startswith("megatron_"):
        return _megatron(config, step - 1 - skipped)
    warmup, end = warmup_steps(config), horizon(config)
    if step <= warmup:
        return peak * step / warmup
    if kind == "constant":
        return peak
    if kind == "inverse_sqrt":
        return max(low, peak * math.sqrt(max(warmup, 1) / step))
    if step >= end:
        return low
    return low + (peak - low) * _SHAPES[kind]((step - warmup) / (end - warmup), config.schedule)


def _megatron(config: Config, taken: int) -> float:
    """Return the rate after `taken` steps by AnnealingLR of Megatron-LM, 2021; the first step has rate 0."""
    peak, end = config.optimizer.lr, horizon(config)
    given = config.schedule.warmup_steps
    warmup = config.schedule.warmup_fraction * end if given is None else given
    if warmup > 0 and taken <= warmup:
        return peak * taken / warmup
    if config.schedule.kind == "megatron_linear":
        return peak * (end - (taken - warmup)) / end
    if config.schedule.kind == "megatron_cosine":
        return peak / 2 * (math.cos(math.pi * (taken - warmup) / end) + 1)
    return peak
