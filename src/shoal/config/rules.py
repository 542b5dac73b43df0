"""Rules that tie several settings together, whatever the machine; the model's own are in models.shape."""

from __future__ import annotations

from shoal.config.sections import Config, Runtime
from shoal.errors import ConfigError, counted


def divisors_near(value: int, total: int) -> str:
    """Name the divisors of `total` next to `value`, below and above."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below = [n for n in divisors if n < value][-1:]
    above = [n for n in divisors if n > value][:1]
    return " or ".join(str(n) for n in below + above)


def check(config: Config, dp: int) -> None:
    """Refuse combinations that cannot work on dp data-parallel ranks, naming what would."""
    _check_batch(config, dp)
    _check_lengths(config)
    _check_profile(config)
    _check_guard(config)
    weights, datasets = config.data.weights, config.data.datasets
    if weights and len(weights) != len(datasets):
        raise ConfigError(
            f"data.weights has {counted(len(weights), 'value')} for {counted(len(datasets), 'dataset')}",
            hint="give one weight for each dataset, or none",
        )


def grad_accum_steps(config: Config, dp: int) -> int:
    """Return the micro-steps of one optimiser step on each of dp data-parallel ranks."""
    return config.train.global_batch_size // (config.train.micro_batch_size * dp)


def hang_limit_s(runtime: Runtime) -> float:
    """Return the seconds without progress that count as a hang."""
    if runtime.hang_s >= runtime.timeout_s:
        raise ConfigError(
            f"runtime.hang_s = {runtime.hang_s:g} is not below runtime.timeout_s = {runtime.timeout_s:g}: "
            "ranks would give each other up before anybody could say why",
            hint="lower runtime.hang_s (0 is half of timeout_s), or raise runtime.timeout_s",
        )
    return runtime.hang_s or runtime.timeout_s / 2


def _check_batch(config: Config, dp: int) -> None:
    total, micro = config.train.global_batch_size, config.train.micro_batch_size
    if total % dp:
        unit = dp * micro  # else the next complaint is of micro_batch_size
        low = total // unit * unit
        near = " or ".join(str(n) for n in (low, low + unit) if n)
        raise ConfigError(
            f"train.global_batch_size = {total} does not divide among {dp} data-parallel ranks",
            hint=f"use train.global_batch_size = {near}",
        )
    share = total // dp
    if share % micro:
        raise ConfigError(
            f"train.micro_batch_size = {micro} does not divide a rank's share of "
            f"{counted(share, 'sequence')} (train.global_batch_size = {total} on "
            f"{counted(dp, 'data-parallel rank')})",
            hint=f"use train.micro_batch_size = {divisors_near(micro, share)}, "
            f"or train.global_batch_size = {max(1, total // (micro * dp)) * micro * dp}",
        )


def _check_lengths(config: Config) -> None:
    for name, length in (("train.seq_len", config.train.seq_len), ("eval.seq_len", config.eval.seq_len)):
        if config.model.network == "decoder" and length > config.model.max_seq_len:
            raise ConfigError(
                f"{name} = {length} is longer than model.max_seq_len = {config.model.max_seq_len} positions",
                hint=f"use {name} = {config.model.max_seq_len} or less, or model.max_seq_len = {length}",
            )
    if config.schedule.min_lr is not None and config.optimizer.lr < config.schedule.min_lr:
        raise ConfigError(
            f"schedule.min_lr = {config.schedule.min_lr:g} is above the peak "
            f"optimizer.lr = {config.optimizer.lr:g}",
            hint=f"use schedule.min_lr = {config.optimizer.lr / 10:g}, or a higher optimizer.lr",
        )
    schedule, steps = config.schedule, config.train.steps
    decay = schedule.decay_steps or steps
    given = schedule.warmup_steps
    name = "warmup_fraction" if given is None else "warmup_steps"
    value = schedule.warmup_fraction if given is None else given
    warmup = value * decay if given is None else value
    if warmup > (longest := min(decay, steps)):
        shorter = longest // 10 if name == "warmup_steps" else longest / decay / 10
        ends = f"the schedule, which ends at step {decay}"
        if decay > steps:
            ends = f"the run of {counted(steps, 'step')}"
        raise ConfigError(
            f"schedule.{name} = {value} is a warm-up of {warmup:.0f} steps, longer than {ends}",
            hint=f"use schedule.{name} = {shorter:g}, or more train.steps",
        )


def _check_profile(config: Config) -> None:
    window, steps = config.train.profile, config.train.steps
    if window and not (len(window) == 2 and window[0] <= window[1] <= steps):
        raise ConfigError(
            f"train.profile = {list(window)} is no window of this run's {steps} steps",
            hint=f"give the first and the last step, for example train.profile = [1, {min(3, steps)}]",
        )


def _check_guard(config: Config) -> None:
    guard = config.guard
    needs = {
        "guard.nonfinite = skip": guard.nonfinite == "skip",
        "guard.spike = skip": guard.spike == "skip" and guard.spike_factor > 0,
        "precision.dtype = fp16": config.precision.dtype == "fp16",
        f"sync.strategy = {config.sync.strategy}": config.sync.strategy != "allreduce",
    }
    if guard.late and any(needs.values()):
        raise ConfigError(
            f"guard.late takes a step before it is judged, and {next(n for n in needs if needs[n])} has to "
            "know before",
            hint="set guard.late = false, or change the other",
        )
