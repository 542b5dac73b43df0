"""What each strategy of `sync.strategy` is, which settings it reads, and which layouts it goes with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal.config.layout import Layout
from shoal.config.sections import Config, Sync
from shoal.errors import ConfigError

# exchange: gradients become the same on all replicas. owner: one replica updates a weight for all.
# outer: replicas train by themselves and agree on weights now and then. asynchronous: without waiting.
Kind = Literal["exchange", "owner", "outer", "asynchronous"]
_OUTER = ("every", "lr", "int8")


@dataclass(frozen=True)
class Strategy:
    """A way for replicas to agree."""

    kind: Kind
    exact: bool  # the result is that of plain all-reduce, to rounding
    reads: tuple[str, ...] = ()  # settings of the section sync


STRATEGIES = {
    "allreduce": Strategy("exchange", True, ("algorithm",)),
    "bf16": Strategy("exchange", False),
    "int8": Strategy("exchange", False, ("block",)),
    "onebit": Strategy("exchange", False, ("block", "warmup_steps")),
    "topk": Strategy("exchange", False, ("density", "warmup_steps")),
    "powersgd": Strategy("exchange", False, ("rank", "warmup_steps")),
    "central_serial": Strategy("owner", True),
    "central_parallel": Strategy("owner", True),
    "device_sharded": Strategy("owner", True),
    "tree_update": Strategy("owner", True),
    "model_averaging": Strategy("outer", False, _OUTER),
    "block_momentum": Strategy("outer", False, (*_OUTER, "momentum")),
    "diloco": Strategy("outer", False, (*_OUTER, "momentum")),
    "streaming_diloco": Strategy("outer", False, (*_OUTER, "momentum", "fragments", "overlap")),
    "async_sgd": Strategy("asynchronous", False, ("staleness",)),
}


def strategy_of(config: Config) -> Strategy:
    """Return what the configured strategy is."""
    return STRATEGIES[config.sync.strategy]


def check_sync(config: Config, layout: Layout) -> None:
    """Raise a ConfigError for the first rule that a strategy breaks; `layout` is that of all replicas."""
    for rule in RULES:
        for message, hint in rule(config, layout):
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
    if strategy_of(config).kind == "owner" and (layout.zero or layout.tp * layout.pp > 1):
        yield (
            f"sync.strategy = {config.sync.strategy} under {layout}: one rank updates whole weights for all "
            "others, and here each rank has a part of them",
            "use plain replicas, such as dp2, or sync.strategy = allreduce",
        )


RULES = (_settings, _owners)
