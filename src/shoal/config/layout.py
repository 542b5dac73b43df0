"""How processes are laid out over the axes (pp, dp_replicate, dp_shard, tp), and people's words for it.

Words are joined by `*`: `dp2`, `zero3x4` (ZeRO-3 over four), `tp2`, `tp2+sp` (with sequence parallelism),
`pp2`, `pp2+gpipe` (with a schedule); `dp2*zero3x2` is hybrid sharding, `1` is one process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from shoal.config.sections import Config, Parallel
from shoal.errors import ConfigError, counted

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
_SIZE = r"([1-9]\d*)"
_WORD = re.compile(rf"1|dp{_SIZE}|zero([123])x{_SIZE}|tp{_SIZE}(\+sp)?|pp{_SIZE}(?:\+(\w+))?")


@dataclass(frozen=True)
class Layout:
    """The size of each axis, outermost first: neighbours in rank order share a layer's matrices."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    zero: int = 0
    sequence: bool = False
    schedule: str = "1f1b"
    replica_groups: int = 1  # replicas that are worlds of their own, of which this is one

    @property
    def dp(self) -> int:
        """Data-parallel processes of this world."""
        return self.dp_replicate * self.dp_shard

    @property
    def batch_parts(self) -> int:
        """Parts that a batch is cut into."""
        return self.replica_groups * self.dp

    @property
    def num_replicas(self) -> int:
        """Copies of the model that train on parts of a batch, in this world or another."""
        return self.replica_groups * self.dp_replicate

    def as_replica_group(self) -> Layout:
        """Return the layout of one replica, which is a world of its own."""
        return replace(self, dp_replicate=1, replica_groups=self.num_replicas)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def stages(self) -> int:
        """Number of pipeline stages that the layers are cut into; a process may hold two."""
        if self.pp == 1:
            return 1
        return self.pp * (2 if self.schedule in ("interleaved", "zero_bubble") else 1)

    def __str__(self) -> str:
        """Return the words of this layout, all replicas included."""
        words = []
        if self.pp > 1:
            words.append(f"pp{self.pp}" + (f"+{self.schedule}" if self.schedule != "1f1b" else ""))
        if self.num_replicas > 1:
            words.append(f"dp{self.num_replicas}")
        if self.zero:
            words.append(f"zero{self.zero}x{self.dp_shard}")
        if self.tp > 1:
            words.append(f"tp{self.tp}" + ("+sp" if self.sequence else ""))
        return "*".join(words) or "1"


def resolve_layout(parallel: Parallel, world_size: int) -> Layout:
    """Lay world_size processes out as the settings say; what tp, pp and ZeRO leave is replicated."""
    dp, rest = divmod(world_size, parallel.tp * parallel.pp)
    if rest:
        unit = parallel.tp * parallel.pp
        near = " or ".join(str(n) for n in (world_size - rest, world_size - rest + unit) if n)
        raise ConfigError(
            f"{counted(world_size, 'process')} cannot be laid out with parallel.tp = {parallel.tp} and "
            f"parallel.pp = {parallel.pp}: the product {unit} does not divide them",
            hint=f"start {near} processes (--nproc)",
        )
    if parallel.dp_shard and not parallel.zero:
        raise ConfigError(
            f"parallel.dp_shard = {parallel.dp_shard} with parallel.zero = 0: nothing would be sharded",
            hint="set parallel.zero = 1, 2 or 3, or leave dp_shard at 0",
        )
    shard = (parallel.dp_shard or dp) if parallel.zero else 1
    if dp % shard:
        allowed = [n for n in range(1, dp + 1) if dp % n == 0]
        raise ConfigError(
            f"parallel.dp_shard = {shard} does not divide the "
            f"{counted(dp, 'data-parallel process')} that tp and pp leave",
            hint=f"use parallel.dp_shard = {', '.join(map(str, allowed))}, or 0 for all of them",
        )
    return Layout(
        parallel.pp, dp // shard, shard, parallel.tp, parallel.zero, parallel.sequence, parallel.schedule
    )


def parse_layout(text: str) -> Layout:
    """Read a layout in words; a ConfigError names the word that is none."""
    values: dict[str, Any] = {}
    for word in text.strip().split("*"):
        match = _WORD.fullmatch(word.strip())
        how = match and match.group(7)
        if match is None or (how is not None and how not in SCHEDULES):
            raise ConfigError(
                f"{word.strip()!r} in layout {text.strip()!r} is no layout word",
                hint="join with *: dp2, zero3x4, tp2, tp2+sp, pp2, pp2+gpipe (or +interleaved, +zero_bubble)",
            )
        dp, zero, shard, tp, sp, pp, _ = match.groups()
        found = {"dp_replicate": dp, "zero": zero, "dp_shard": shard, "tp": tp, "pp": pp}
        new: dict[str, Any] = {name: int(size) for name, size in found.items() if size}
        new |= {"sequence": True} if sp else {}
        new |= {"schedule": how} if how else {}
        if repeated := values.keys() & new.keys():
            raise ConfigError(
                f"layout {text.strip()!r} sets {min(repeated)} twice", hint="name each axis once"
            )
        values |= new
    return Layout(**values)


def settings_of(layout: Layout) -> dict[str, Any]:
    """Return the settings of the section `parallel` that give this layout on layout.world_size processes."""
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "zero": layout.zero,
        "dp_shard": layout.dp_shard if layout.zero else 0,
        "sequence": layout.sequence,
        "schedule": layout.schedule,
    }


def under(config: Config, layout: Layout) -> Config:
    """Return the configuration under a layout; a split or offload that it cannot have is left out."""
    given = config.parallel
    kept = {
        "split": given.split if len(given.split) == layout.stages else (),
        "offload": given.offload and layout.zero > 0,
    }
    parallel = given.model_copy(update={**settings_of(layout), **kept})
    return config.model_copy(update={"parallel": parallel})
