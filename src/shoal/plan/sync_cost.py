"""Cost formulas of strategies: bytes, messages and time of a step, and the bandwidth below which one pays.

A step takes compute + the strategy's own work + the communication that is not hidden:

    step = compute + work + max(messages x latency + bytes / bandwidth - hidden, the part that nothing hides)

For S bytes (E encoded) and n replicas on h hosts, with r = n/h neighbouring replicas on each host:

| strategy | through a host's link, one way, in series | messages in series | hidden |
| --- | --- | --- | --- |
| allreduce, powersgd | 2 (n-1)/n E, in a ring | 2 (n-1) a bucket, powersgd twice | all but one bucket |
| bf16, int8, onebit | r (n-r)/n E + (n-1)/n E | 2 (n-1) a bucket, 1 of 2 replicas | all but one bucket |
| topk | (n-1) E | 2 (n-1) a bucket | all but one bucket |
| central_* | (n-r) S in, then (n-r) S out | serial: 2 (n-1) a bucket, parallel: 2 | nothing |
| device_sharded | (n-1) times the largest share, twice | 2 (n-1) | nothing |
| tree_update | 2 log2(h) S | 2 log2(n) a bucket | nothing |
| outer strategies | r (n-r)/n E + (n-1)/n E, every H steps | 2 (n-1) | streaming: behind `overlap` steps |
| async_sgd | 2 r (n-r)/n S where shares are even | 2 | all, behind the next step, with any staleness |

Only buckets of plain replicas are hidden, behind the backward pass of the last micro-batch. The last bucket
is full when this pass ends. Links inside a host are free. If a replica has several ranks, each sends its
part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.config.sections import Sync
from shoal.config.sync_rules import BUCKET_BYTES, STRATEGIES
from shoal.plan.link_cost import all_reduce_cost, collective_cost, hierarchical_cost

_DDP_BUCKETS = (1 << 20, 25 << 20)  # bytes: of the first one, and of each that follows
Shapes = Mapping[str, Sequence[int]]  # of weights by name, in the order of the model


@dataclass(frozen=True)
class Replicas:
    """Replicas to synchronise, with equal numbers of neighbours on each host."""

    count: int
    hosts: int
    ranks: int = 1  # of each
    gradient_bytes: int = 4  # size of an element that is sent, for strategies without a format of their own

    @property
    def here(self) -> int:
        """Number of replicas on a host."""
        return self.count // self.hosts


@dataclass(frozen=True)
class Demand:
    """Mean network load of a strategy in a step."""

    sent_bytes: float  # by the rank that sends most
    link_bytes: float  # in series through the busiest host's link
    messages: float  # in series
    behind_backward: float = 0.0  # fraction of the last backward pass that hides communication
    behind_steps: float = 0.0  # number of steps that hide communication
    tail: float = 1.0  # fraction of the communication that is never hidden


@dataclass(frozen=True)
class ComputeTime:
    """Time of a replica's step without communication."""

    step_s: float
    backward_s: float  # of the last micro-batch's backward pass, in it


@dataclass(frozen=True)
class Line:
    """Seconds = fixed_s + num_bytes / bandwidth."""

    fixed_s: float
    num_bytes: float

    def at(self, per_byte_s: float) -> float:
        """Return the seconds at `per_byte_s` seconds a byte."""
        return self.fixed_s + self.num_bytes * per_byte_s


def step_lines(
    demand: Demand, compute_time: ComputeTime, work_s: float, latency_s: float
) -> tuple[Line, ...]:
    """Return lines over the time of a byte; the step takes the maximum of them."""
    base, waiting = compute_time.step_s + work_s, demand.messages * latency_s
    hidden = demand.behind_backward * compute_time.backward_s + demand.behind_steps * compute_time.step_s
    return (
        Line(base + waiting - hidden, demand.link_bytes),
        Line(base + waiting * demand.tail, demand.link_bytes * demand.tail),
    )


def seconds(lines: Sequence[Line], per_byte_s: float) -> float:
    """Return the time of a step at `per_byte_s` seconds a byte."""
    return max(line.at(per_byte_s) for line in lines)


def break_even(lines: Sequence[Line], others: Sequence[Line]) -> float:
    """Return the bandwidth, in bytes a second, below which `lines` never exceed `others`.

    0 if they exceed them on slow links, infinity if they never exceed them.
    """
    crossings = {
        (other.fixed_s - line.fixed_s) / (line.num_bytes - other.num_bytes)
        for line in lines
        for other in others
        if line.num_bytes != other.num_bytes
    }
    edges = [math.inf, *sorted((x for x in crossings if x > 0), reverse=True), 0.0]
    for upper, lower in pairwise(edges):
        between = (upper + lower) / 2 if upper < math.inf else 2 * lower or 1.0
        if seconds(lines, between) > seconds(others, between) * (1 + 1e-12):
            return 1 / upper
    return math.inf


def demand(sync: Sync, shapes: Shapes, replicas: Replicas) -> Demand:
    """Return the network load of a strategy, without warm-up."""
    if replicas.count == 1:
        return Demand(0, 0, 0)
    kinds = {"exchange": _exchange, "owner": _owner, "outer": _outer, "asynchronous": _asynchronous}
    return kinds[STRATEGIES[sync.strategy].kind](sync, shapes, replicas)


def _exchange(sync: Sync, shapes: Shapes, replicas: Replicas) -> Demand:
    """Return the load of buckets; those of plain replicas are sent during the backward pass."""
    n, total = replicas.count, _count(shapes)
    buckets = _buckets(shapes, replicas.ranks)
    first, tail = buckets[0] / total, buckets[-1] / total
    rounds = 2 * (n - 1)
    match sync.strategy:
        case "allreduce":
            by_rank, by_link, rounds = _all_reduce(sync.algorithm, replicas)
            num_bytes = float(replicas.gradient_bytes * total)
        case "powersgd":
            by_rank, by_link, _ = _all_reduce("chunked_ring", replicas)
            num_bytes, rounds = 4.0 * _thin(sync.rank, shapes), 2 * rounds
        case "topk":
            by_rank = by_link = n - 1.0
            num_bytes = 8 * sync.density * total
        case _:
            by_rank, by_link = _two_phase(replicas)
            num_bytes, rounds = encoded_bytes(sync, total), 1 if n == 2 else rounds
    hiding = replicas.ranks == 1 and len(buckets) > 1
    return Demand(
        by_rank * num_bytes / replicas.ranks,
        by_link * num_bytes,
        rounds * len(buckets),
        behind_backward=1 - first if hiding else 0.0,
        tail=tail if hiding else 1.0,
    )


def encoded_bytes(sync: Sync, count: int) -> float:
    """Return the bytes of `count` gradients in the format of bf16, int8 or onebit."""
    per_value = {"bf16": 2.0, "int8": 1 + 4 / sync.block, "onebit": 1 / 8 + 2 / sync.block}
    return per_value[sync.strategy] * count


def _owner(sync: Sync, shapes: Shapes, replicas: Replicas) -> Demand:
    """Return the load of gradients sent to the owners, then of weights, in fp32, sent back."""
    n, total = replicas.count, _count(shapes)
    both = replicas.gradient_bytes + 4
    buckets = -(-total * 4 // BUCKET_BYTES)
    match sync.strategy:
        case "device_sharded":
            largest = max(total / n, *map(math.prod, shapes.values()))
            return Demand(
                (n - 1) / n * total * both,
                (n - 1) * largest * both,
                _rounds(n, "reduce_scatter", "all_gather"),
            )
        case "tree_update":
            sent, through = 4 * _levels(n) * total, _levels(replicas.hosts) * total * both
            return Demand(sent, through, _rounds(n, "reduce", "broadcast") * buckets)
    in_turn = n - 1 if sync.strategy == "central_serial" else 1
    return Demand(4 * (n - 1) * total, (n - replicas.here) * total * both, 2 * in_turn * buckets)


def _outer(sync: Sync, shapes: Shapes, replicas: Replicas) -> Demand:
    """Return the load of an exchange of the whole model, or of each fragment, in `every` steps."""
    by_rank, by_link = _two_phase(replicas)
    block = sync.block if sync.int8 else 1
    num_rows = sum(-(-math.prod(shape) // block) for shape in shapes.values())
    num_bytes = num_rows * (block + 4 if sync.int8 else 4) / sync.every
    streaming = sync.strategy == "streaming_diloco"
    exchanges = (sync.fragments if streaming else 1) / sync.every
    return Demand(
        by_rank * num_bytes / replicas.ranks,
        by_link * num_bytes,
        2 * (replicas.count - 1) * exchanges,
        behind_steps=sync.overlap * exchanges if streaming else 0.0,
        tail=0.0 if streaming and sync.overlap else 1.0,
    )


def _asynchronous(sync: Sync, shapes: Shapes, replicas: Replicas) -> Demand:
    """Return the load of gradients and weights at the host of the rank that serves most."""
    n, here, total = replicas.count, replicas.here, _count(shapes)
    largest = max(total / n, *map(math.prod, shapes.values()))
    served = largest + (here - 1) * (total - largest) / (n - 1)  # by this host
    out = here * (total - served) + (n - here) * served
    hiding = sync.staleness > 0
    sent = total + (n - 2) * largest
    return Demand(4 * sent, 4 * out, 2, behind_steps=float(hiding), tail=0.0 if hiding else 1.0)


def _all_reduce(algorithm: str, replicas: Replicas) -> tuple[float, float, int]:
    """Return tensors sent by the busiest rank, tensors in series through its host's link, and rounds."""
    n, h = replicas.count, replicas.hosts
    if algorithm == "hierarchical":
        ring, tree = 2 * (h - 1) / h, _levels(replicas.here)
        return ring + tree, ring, hierarchical_cost(replicas.here, h, 1).num_rounds
    rounds_of = "chunked_ring" if algorithm == "backend" else algorithm
    num_rounds = all_reduce_cost(rounds_of, n, 1).num_rounds
    match algorithm:
        case "ring":
            return n - 1, n - 1, num_rounds
        case "tree":
            return _levels(n), 2 * _levels(h), num_rounds
        case "halving_doubling":
            pairs, rest = _paired(n)
            pairs_of_hosts, rest_of_hosts = _paired(h)
            return pairs + rest, replicas.here * (pairs_of_hosts + 2 * rest_of_hosts), num_rounds
    return 2 * (n - 1) / n, 2 * (n - 1) / n, num_rounds


def _two_phase(replicas: Replicas) -> tuple[float, float]:
    """Return the same for shares sent to the rank that sums them, then sums in a ring."""
    n, here = replicas.count, replicas.here
    return 2 * (n - 1) / n, (here * (n - here) + n - 1) / n


def _paired(size: int) -> tuple[float, int]:
    """Return tensors sent by halving and doubling among a power of two, and whether ranks are left over."""
    paired = 2 ** int(math.log2(size))
    return 2 * (paired - 1) / paired, int(size > paired)


def _rounds(size: int, *names: str) -> int:
    return sum(collective_cost(name, size, 0).num_rounds for name in names)


def _levels(size: int) -> int:
    return math.ceil(math.log2(size))


def _count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def _thin(rank: int, shapes: Shapes) -> int:
    """Return the number of values that PowerSGD sends: P and Q if these are fewer, else the matrix."""
    total = 0
    for shape in shapes.values():
        sides = shape[0] + math.prod(shape[1:])
        total += min(rank * sides, math.prod(shape)) if len(shape) > 1 else shape[0]
    return total


def _buckets(shapes: Shapes, ranks: int) -> list[int]:
    """Return the elements of each of DDP's buckets, of all `ranks` of a replica together.

    They are in the order of the backward pass: from the end of the model.
    """
    buckets, filled, limit = [], 0, _DDP_BUCKETS[0]
    for shape in reversed(list(shapes.values())):
        filled += math.prod(shape)
        if 4 * filled >= limit * ranks:
            buckets.append(filled)
            filled, limit = 0, _DDP_BUCKETS[1]
    return [*buckets, filled] if filled else buckets
