"""All layouts of a configuration on a cluster: those that are legal and fit, by predicted time (no torch).

A candidate is a layout with a micro-batch size, recompute and offload. Costs are asked for in the order of a
lower bound, the computation of a step without anything that sharding and replicas add, and not at all where
the bound says that they cannot matter: the computation alone takes longer than the whole step of the
layouts found, or what is held between steps, whatever the micro-batch and recompute, does not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.config import rules
from shoal.config.layout import SCHEDULES, Layout, under
from shoal.config.layout_rules import check_layout
from shoal.config.sections import Config
from shoal.config.sync_rules import check_sync
from shoal.errors import ConfigError, counted
from shoal.models.shape import ModelShape
from shoal.plan.cluster import Cluster
from shoal.plan.memory import RankMemory, worst
from shoal.plan.step_time import INSIDE, StepTime, step_time
from shoal.plan.workload import Workload

USABLE = 0.9  # of a device's memory, for layouts that are chosen: predictions may be off
_MOST_SEQUENCES = 64  # in a micro-batch that is tried: larger ones are no faster
_RECOMPUTE = ("none", "selective", "full")  # from the most memory to the least
_ADDED = ("communication", "optimiser")  # by replicas; ZeRO adds more: a step takes at least the others
_BOUND = 0.98  # of these others: to be on the safe side
_STATE = ("weights", "gradients", "optimizer", "pipeline")  # between steps, for any micro-batch and recompute
MEMORY, BESIDE_TP = "memory", "tp across nodes"  # reasons that are no rule's


@dataclass(frozen=True)
class Costs:
    """The formulas that judge a candidate."""

    memory: Callable[[Workload], RankMemory] = worst
    time: Callable[[Workload], StepTime] = step_time


@dataclass(frozen=True)
class Plan:
    """A workload with the memory of the rank that needs most, and the time of a step."""

    workload: Workload
    memory: RankMemory
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether the device has the memory."""
        return self.memory.total_bytes <= self.workload.cluster.device.memory_bytes

    def __str__(self) -> str:
        """Name layout, micro-batch, recompute and offload."""
        config = self.workload.config
        words = f"{self.workload.layout}, micro-batch {config.train.micro_batch_size}"
        words += f", recompute {config.train.recompute}" if config.train.recompute != "none" else ""
        return words + (", offload" if config.parallel.offload else "")


@dataclass
class Rejected:
    """Candidates that are rejected for one reason, with the sentence of one of them."""

    reason: str
    sentence: str
    count: int = 0
    bytes: float = math.inf  # needed by the one in the sentence, if the reason is memory


@dataclass
class Found:
    """The outcome of a search."""

    ranked: list[Plan]  # the best of each layout, fastest first
    rejected: list[Rejected]  # the most frequent reason first
    num_slower: int  # that fit the rules, and are not among the ranked

    @property
    def num_rejected(self) -> int:
        """Candidates that a rule excludes, or the memory."""
        return sum(one.count for one in self.rejected)

    @property
    def num_candidates(self) -> int:
        """All candidates; those that a rule excludes before they are divided further count once."""
        return len(self.ranked) + self.num_slower + self.num_rejected


_Part = tuple[float, Workload]  # a candidate without what ZeRO and replicas decide, after its lower bound


@dataclass
class _Search:
    config: Config
    shape: ModelShape
    cluster: Cluster
    dtype: str
    fixed: frozenset[str]
    costs: Costs
    best: int
    rejected: dict[str, Rejected] = field(default_factory=dict)
    ranked: dict[object, Plan] = field(default_factory=dict)
    held: dict[object, int] = field(default_factory=dict)  # bytes between steps, by layout and offload
    num_slower: int = 0

    def run(self) -> Found:
        for bound_s, workload in sorted(self._parts(), key=lambda part: part[0]):
            variants = list(self._variants(workload.layout))
            if bound_s >= self._limit_s():
                self.num_slower += len(variants)
                continue
            for layout, offload in variants:
                self._try(workload, layout, offload)
        ranked = sorted(self.ranked.values(), key=lambda plan: plan.time.total)
        rejected = sorted(self.rejected.values(), key=lambda one: -one.count)
        slower = self.num_slower + len(ranked[self.best :])
        return Found(ranked[: self.best], rejected, slower)

    def _limit_s(self) -> float:
        """Return the step time that a further layout has to beat."""
        times = sorted(plan.time.total for plan in self.ranked.values())
        return times[self.best - 1] if len(times) >= self.best else math.inf

    def _parts(self) -> Iterator[_Part]:
        world, per_node = self.cluster.world_size, self.cluster.per_node
        for tp in self._choose("parallel.tp", _divisors(world)):
            for pp in self._choose("parallel.pp", _divisors(world // tp)):
                if world % (tp * pp):
                    self._reject("sizes", f"tp {tp} x pp {pp} does not divide the {world} devices")
                    continue
                frame = Layout(pp=pp, tp=tp, dp_replicate=world // tp // pp)
                if tp > per_node and "parallel.tp" not in self.fixed:
                    self._reject(
                        BESIDE_TP,
                        f"tp {tp} is larger than a node of {per_node}: the exchanges in each layer would "
                        "cross the slow links (ask for it with --parallel.tp)",
                    )
                    continue
                for layout in self._frames(frame):
                    if self._has_given_split(layout):
                        yield from self._micro_batches(layout)

    def _frames(self, frame: Layout) -> Iterator[Layout]:
        for schedule in self._choose("parallel.schedule", SCHEDULES):
            if frame.pp == 1 and schedule != "1f1b" and "parallel.schedule" not in self.fixed:
                continue
            for sequence in self._choose("parallel.sequence", (False, True)):
                if frame.tp > 1 or not sequence:
                    yield replace(frame, schedule=schedule, sequence=sequence)

    def _has_given_split(self, layout: Layout) -> bool:
        """Say whether a layout has as many stages as the split that the user has fixed, if any."""
        split = self.config.parallel.split if "parallel.split" in self.fixed else ()
        if not split or len(split) == layout.stages:
            return True
        self._reject(
            "split",
            f"parallel.split = {list(split)} names {counted(len(split), 'stage')}, and {layout} has "
            f"{layout.stages}",
        )
        return False

    def _micro_batches(self, layout: Layout) -> Iterator[_Part]:
        share, rest = divmod(self.config.train.global_batch_size, layout.dp)
        given = self.config.train
        sizes = [given.micro_batch_size] if rest else [n for n in _divisors(share) if n <= _MOST_SEQUENCES]
        for size in self._choose("train.micro_batch_size", sizes):
            for recompute in self._recomputes():
                workload = self._workload(layout, size, recompute, offload=False)
                if self._is_legal(workload):
                    time = self.costs.time(workload)
                    yield _BOUND * (time.total - sum(time.phases[n] for n in _ADDED)), workload

    def _variants(self, frame: Layout) -> Iterator[tuple[Layout, bool]]:
        """Yield the ways to divide the data-parallel ranks, each without and with offload."""
        dp = frame.dp
        on_host = (False, True) if self.cluster.device.kind == "cuda" else (False,)
        for zero in self._choose("parallel.zero", range(4)):
            for shard in self._choose("parallel.dp_shard", _divisors(dp)[1:] or [1]) if zero else [1]:
                shard = shard or dp
                if dp % shard:
                    self._reject("sizes", f"dp_shard {shard} does not divide {dp} data-parallel ranks")
                    continue
                layout = replace(frame, zero=zero, dp_shard=shard, dp_replicate=dp // shard)
                alone = zero > 0 and layout.world_size == shard
                is_cut = not zero or shard > 1 or "parallel.zero" in self.fixed
                for offload in self._choose("parallel.offload", on_host):
                    if alone if offload else is_cut:  # on one GPU, ZeRO is for offload alone
                        yield layout, offload

    def _choose(self, name: str, values: Iterable[Any]) -> Sequence[Any]:
        """Return the values to try for a setting: one that the user has fixed is the only one."""
        if name not in self.fixed:
            return list(values)
        section, _, field_name = name.partition(".")
        return [getattr(getattr(self.config, section), field_name)]

    def _recomputes(self) -> Sequence[str]:
        """Return the values of recompute to try: inputs in host memory, where they are fixed, need full."""
        if self._inputs_on_host() and "train.recompute" not in self.fixed:
            return ["full"]
        return self._choose("train.recompute", _RECOMPUTE)

    def _inputs_on_host(self) -> bool:
        return self.config.train.recompute_offload and "train.recompute_offload" in self.fixed

    def _workload(self, layout: Layout, size: int, recompute: str, *, offload: bool) -> Workload:
        train = {"micro_batch_size": size, "recompute": recompute}
        wanted = self.config.train.recompute_offload and recompute == "full"
        train["recompute_offload"] = wanted or self._inputs_on_host()
        return workload_of(self.config, layout, self.shape, self.cluster, self.dtype, train, offload=offload)

    def _is_legal(self, workload: Workload) -> bool:
        """Ask the rules; count a candidate that breaks one under its sentence without the values."""
        config, layout = workload.config, workload.layout
        try:
            check_rules(config, layout, self.shape)
        except ConfigError as error:
            text = error.message.replace(str(layout), "L")
            reason = re.sub(r"schedule \w+|parallel.schedule = \w+", "schedule", text)
            self._reject(
                re.sub(r"\d[\d,]*|\bbatch\b|\bbatches\b|processes|process|micro-batches", "", reason),
                error.message,
            )
            return False
        return True

    def _try(self, part: Workload, layout: Layout, offload: bool) -> None:
        """Cost a candidate, and keep it where it fits and is the best of its layout."""
        size, recompute = part.config.train.micro_batch_size, part.config.train.recompute
        workload = self._workload(layout, size, recompute, offload=offload)
        if (layout.zero or offload) and not self._is_legal(workload):
            return
        usable = USABLE * self.cluster.device.memory_bytes
        if self.held.get((layout, offload), 0) > usable:
            self._reject(MEMORY, "")
            return
        key = (layout.pp, layout.tp, layout.zero, offload)
        time = self.costs.time(workload)
        known = self.ranked.get(key)
        if time.total >= self._limit_s() or (known and time.total >= known.time.total):
            self.num_slower += 1
            return
        memory = self.costs.memory(workload)
        self.held[layout, offload] = sum(memory.moments[0].bytes[name] for name in _STATE)
        plan = Plan(workload, memory, time)
        if memory.total_bytes > usable:
            self._reject_too_large(plan)
        else:
            self.num_slower += known is not None
            self.ranked[key] = plan

    def _reject_too_large(self, plan: Plan) -> None:
        """Count a candidate that does not fit; the sentence is that of the one which needs least."""
        peak = plan.memory.peak
        most = max(peak.bytes, key=lambda name: peak.bytes[name])
        device = self.cluster.device
        sentence = (
            f"{plan} needs {plan.memory.total_bytes / 1e9:,.1f} of {device.memory_bytes / 1e9:,.1f} GB "
            f"({USABLE:.0%} may be planned), most of it {most.replace('_', ' ')} "
            f"({peak.bytes[most] / 1e9:,.1f} GB, {peak.name})"
        )
        self._reject(MEMORY, sentence)
        one = self.rejected[MEMORY]
        if plan.memory.total_bytes < one.bytes:
            one.sentence, one.bytes = sentence, plan.memory.total_bytes

    def _reject(self, reason: str, sentence: str) -> None:
        self.rejected.setdefault(reason, Rejected(reason, sentence)).count += 1


def search(
    config: Config,
    shape: ModelShape,
    cluster: Cluster,
    dtype: str,
    *,
    fixed: Collection[str] = (),
    costs: Costs | None = None,
    best: int = 8,
) -> Found:
    """Return the best of the layouts that are legal and fit, and why the others are not.

    `fixed` names settings that keep the value of the configuration, such as "train.micro_batch_size".
    """
    return _Search(config, shape, cluster, dtype, frozenset(fixed), costs or Costs(), best).run()


def workload_of(
    config: Config,
    layout: Layout,
    shape: ModelShape,
    cluster: Cluster,
    dtype: str,
    train: Mapping[str, Any] | None = None,
    *,
    offload: bool = False,
) -> Workload:
    """Return a configuration under a layout as a workload, with other settings of the section train."""
    config = under(config, layout)
    sections = {
        "parallel": config.parallel.model_copy(update={"offload": offload}),
        "train": config.train.model_copy(update=dict(train or {})),
    }
    return Workload(config.model_copy(update=sections), shape, layout, cluster, dtype)


def check_rules(config: Config, layout: Layout, shape: ModelShape) -> None:
    """Raise a ConfigError for the first rule, of settings or layout, that a candidate breaks."""
    rules.check(config, layout.batch_parts)
    check_sync(config, layout, shape.n_layers)
    check_layout(config, layout, shape)


def parts_of(time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by parts that do not overlap."""
    phases = dict(time.phases)
    computing = phases.pop("forward") + phases.pop("backward") - sum(phases[name] for name in INSIDE)
    return {"computing": computing, **phases}


def difference(plan: Plan, best: Plan) -> str:
    """Say what costs a plan time against the best, and how much more or less memory it needs."""
    total, base = best.time.total, parts_of(best.time)
    changes = {name: (value - base[name]) / total for name, value in parts_of(plan.time).items()}
    named = sorted((name for name in changes if abs(changes[name]) >= 0.01), key=lambda n: -changes[n])
    if len(named) > 3:
        named = [*named[:2], named[-1]]
    words = [f"{name} {changes[name]:+.0%}" for name in named]
    gigabytes = (plan.memory.total_bytes - best.memory.total_bytes) / 1e9
    if abs(gigabytes) >= 0.1:
        words.append(f"{abs(gigabytes):,.1f} GB {'more' if gigabytes > 0 else 'less'}")
    return ", ".join(words) or "the same within 1 %"


def smallest_change(
    config: Config,
    shape: ModelShape,
    cluster: Cluster,
    dtype: str,
    *,
    fixed: Collection[str] = (),
    costs: Costs | None = None,
) -> str:
    """Say which change, of those from the smallest to the largest, lets a layout be legal and fit."""

    def admits(config: Config = config, cluster: Cluster = cluster, fixed: Collection[str] = fixed) -> str:
        found = search(config, shape, cluster, dtype, fixed=fixed, costs=costs, best=1)
        return f" (then {found.ranked[0]})" if found.ranked else ""

    for name in sorted(fixed):
        if then := admits(fixed=set(fixed) - {name}):
            return f"leave {name} to the planner{then}"
    train, world = config.train, cluster.world_size
    size = -(-train.global_batch_size // world) * world
    if size != train.global_batch_size:
        other = config.model_copy(update={"train": train.model_copy(update={"global_batch_size": size})})
        if then := admits(other):
            return f"use train.global_batch_size = {size}{then}"
    for times in (2, 4, 8, 16, 32, 64):
        if then := admits(cluster=replace(cluster, nodes=times * cluster.nodes)):
            return f"use {times} times as many nodes, {times * cluster.nodes}{then}"
    for parts in (2, 4, 8, 16):
        other = config.model_copy(
            update={
                "train": train.model_copy(update={"seq_len": max(1, train.seq_len // parts)}),
                "eval": config.eval.model_copy(update={"seq_len": 0}),
            }
        )
        if then := admits(other):
            return f"use train.seq_len = {other.train.seq_len}{then}"
    return "use a smaller model, or devices with more memory"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
