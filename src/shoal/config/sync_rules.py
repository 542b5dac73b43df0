"""What each strategy of `sync.strategy` is, which settings it reads, and which layouts it goes with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from shoal.config.layout import Layout
from shoal.config.sections import Config, Sync
from shoal.errors import ConfigError

# exchange: gradients become the same on all replicas. owner: one replica updates a weight for all.
# outer: replicas train by themselves and agree on weights now and then. asynchronous: without waiting.
Kind = Literal["exchange", "owner", "outer", "asynchronous"]
BUCKET_BYTES = 32 << 20  # of what is sent after the backward pass
_OUTER = ("every", "lr", "int8", "block", "warmup_steps")
_WITH_MOMENTUM = (*_OUTER, "momentum", "momentum_follows_lr")


@dataclass(frozen=True)
class Strategy:
    """A way for replicas to agree."""

    kind: Kind
    exact: bool  # the result is that of plain all-reduce, to rounding
    reads: tuple[str, ...] = ()  # settings of the section sync

    @property
    def apart(self) -> bool:
        """Say whether each replica is a world of its own."""
        return self.kind in ("outer", "asynchronous")


STRATEGIES = {
    "allreduce": Strategy("exchange", True, ("algorithm",)),
    "bf16": Strategy("exchange", False),
    "int8": Strategy("exchange", False, ("block",)),
    "onebit": Strategy("exchange", False, ("block", "feedback", "warmup_steps")),
    "topk": Strategy("exchange", False, ("density", "feedback", "warmup_steps")),
    "powersgd": Strategy("exchange", False, ("rank", "warmup_steps")),
    "central_serial": Strategy("owner", True),
    "central_parallel": Strategy("owner", True),
    "device_sharded": Strategy("owner", True),
    "tree_update": Strategy("owner", True),
    "model_averaging": Strategy("outer", False, _OUTER),
    "block_momentum": Strategy("outer", False, _WITH_MOMENTUM),
    "diloco": Strategy("outer", False, _WITH_MOMENTUM),
    "streaming_diloco": Strategy("outer", False, (*_WITH_MOMENTUM, "fragments", "overlap")),
    "async_sgd": Strategy("asynchronous", False, ("staleness",)),
}


def strategy_of(config: Config) -> Strategy:
    """Return what the configured strategy is."""
    return STRATEGIES[config.sync.strategy]


def check_sync(config: Config, layout: Layout, num_blocks: int) -> None:
    """Raise a ConfigError for the first rule that a strategy breaks; `layout` is that of all replicas.

    `num_blocks` is the number of blocks of a decoder, or of layers with weights of another network.
    """
    problems = [rule(config, layout) for rule in RULES]
    for message, hint in chain(*problems, _fragments(config, num_blocks)):
        raise ConfigError(message, hint=hint)


Problem = tuple[str, str]  # what is wrong, with the values; what to choose


def _settings(config: Config, layout: Layout) -> Iterator[Problem]:
    sync, plain = config.sync, Sync()
    for name, value in sync:
        if name == "strategy" or value == getattr(plain, name) or name in strategy_of(config).reads:
            continue
        readers = ", ".join(key for key, strategy in STRATEGIES.items() if name in strategy.reads)
        yield (
            f"sync.{name} = {value} with sync.strategy = {sync.strategy}, which does not read it",
            f"leave it out, or choose a strategy that does: {readers}",
        )


def _owners(config: Config, layout: Layout) -> Iterator[Problem]:
    kind = strategy_of(config).kind
    if kind in ("owner", "asynchronous") and (layout.zero or layout.tp * layout.pp > 1):
        yield (
            f"sync.strategy = {config.sync.strategy} under {layout}: one rank updates whole weights for all "
            "others, and here each rank has a part of them",
            "use plain replicas, such as dp2, or sync.strategy = allreduce",
        )


def _somebody_to_agree_with(config: Config, layout: Layout) -> Iterator[Problem]:
    sync = config.sync
    plain = (sync.strategy, sync.algorithm) == ("allreduce", "backend")
    alone = layout.num_replicas == 1 < layout.world_size  # one process needs no partner
    if strategy_of(config).kind == "owner" or plain or not alone:
        return
    name = "strategy" if sync.algorithm == "backend" else "algorithm"
    what = f"sync.{name} = {getattr(sync, name)}"
    if layout.zero:
        yield (
            f"{what} under {layout}, which has one replica: ZeRO sums gradients to its shards by itself, "
            "and nothing is left to agree on",
            "set parallel.dp_shard to a part of the processes, as in dp2*zero2x2, or parallel.zero = 0",
        )
    else:
        yield (
            f"{what} under {layout}, which has one replica: there is nobody to agree with",
            "leave the section sync out, or add replicas, as in dp2*tp2",
        )


def reads_reduce_dtype(strategy: str) -> bool:
    """Say whether gradients are sent between replicas as `precision.reduce_dtype`; ZeRO's always do."""
    return strategy == "allreduce" or STRATEGIES[strategy].kind == "owner"


def _reduce_dtype(config: Config, layout: Layout) -> Iterator[Problem]:
    strategy = config.sync.strategy
    if not reads_reduce_dtype(strategy) and config.precision.reduce_dtype != "fp32" and not layout.zero:
        yield (
            f"precision.reduce_dtype = {config.precision.reduce_dtype} with sync.strategy = {strategy}, "
            "which has a format of its own for what it sends",
            "leave reduce_dtype at fp32, or use sync.strategy = allreduce",
        )


def _warmup(config: Config, layout: Layout) -> Iterator[Problem]:
    if config.sync.warmup_steps >= config.train.steps:
        yield (
            f"sync.warmup_steps = {config.sync.warmup_steps} with train.steps = {config.train.steps}: "
            f"sync.strategy = {config.sync.strategy} would never begin",
            "use fewer steps of warm-up, or sync.strategy = allreduce",
        )


def _outer(config: Config, layout: Layout) -> Iterator[Problem]:
    sync, steps = config.sync, config.train.steps
    if strategy_of(config).kind != "outer":
        return
    if sync.every > steps:
        yield (
            f"sync.every = {sync.every} with train.steps = {steps}: replicas would train apart all the way",
            f"use sync.every = {max(1, steps // 10)}, or more train.steps",
        )
    if sync.block != Sync().block and not sync.int8:
        yield (
            f"sync.block = {sync.block} with sync.int8 = false: gradients are sent whole, without scales",
            "set sync.int8 = true, or leave sync.block out",
        )


def _fragments(config: Config, layers: int) -> Iterator[Problem]:
    sync, network = config.sync, config.model.network
    name = "model.n_layers" if network == "decoder" else f"layers with weights of {network}"
    if sync.strategy != "streaming_diloco":
        return
    if sync.fragments > min(layers, sync.every):
        yield (
            f"sync.fragments = {sync.fragments} with {name} = {layers}, sync.every = {sync.every}: "
            "a part has at least one block, and a step to begin its exchange that it shares with no other",
            f"use sync.fragments = {min(layers, sync.every)} or less",
        )
    between = sync.every // sync.fragments
    if sync.overlap and sync.overlap >= between:
        yield (
            f"sync.overlap = {sync.overlap} with a part of the model every sync.every / sync.fragments = "
            f"{between} steps: its exchange would be under way when that of the next one begins",
            f"use sync.overlap <= {between - 1}, or sync.every = {(sync.overlap + 1) * sync.fragments}",
        )


def _norm(config: Config, layout: Layout) -> Iterator[Problem]:
    cannot = config.model.network == "decoder" or strategy_of(config).apart
    if config.model.batch_statistics == "synchronised" and cannot:
        yield (
            f"model.batch_statistics = synchronised with model.network = {config.model.network} and "
            f"sync.strategy = {config.sync.strategy}: it is for networks with batch normalisation, whose "
            "replicas take each step together",
            "use model.batch_statistics = replica",
        )


def _slow_link(config: Config, layout: Layout) -> Iterator[Problem]:
    rate, sync = config.runtime.slow_link, config.sync
    if rate and (sync.strategy, sync.algorithm) == ("allreduce", "backend"):
        yield (
            f"runtime.slow_link = {rate:g} with the back end's own all-reduce, which cannot be slowed",
            "use sync.algorithm = chunked_ring, or another sync.strategy",
        )
    if rate and config.runtime.device == "cuda":
        yield (
            f"runtime.slow_link = {rate:g} on cuda: transfers between GPUs are not slowed",
            "use runtime.device = cpu",
        )


RULES = (_settings, _owners, _somebody_to_agree_with, _reduce_dtype, _warmup, _outer, _norm, _slow_link)
