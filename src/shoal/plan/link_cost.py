"""Cost formulas of all-reduce: rounds in series, and bytes through the busiest rank.

Seconds are rounds x latency + bytes / bandwidth, the model of Thakur, Rabenseifner and Gropp (2005) without
the time to add, which is hidden when chunks are added as they arrive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.errors import InputError


@dataclass(frozen=True)
class Link:
    """Link between two ranks."""

    latency_s: float  # of a message
    bytes_per_s: float  # one way


@dataclass(frozen=True)
class Cost:
    """Messages and bytes of one collective."""

    num_rounds: int
    num_bytes: float  # the larger of bytes sent and received by the busiest rank

    def seconds(self, link: Link) -> float:
        """Return the seconds over a link."""
        return self.num_rounds * link.latency_s + self.num_bytes / link.bytes_per_s


def all_reduce_cost(algorithm: str, size: int, num_bytes: float) -> Cost:
    """Return the cost of an algorithm on `size` ranks for a tensor of `num_bytes`.

    Raises:
        KeyError: There is no formula for the algorithm.
    """
    return _FORMULAS[algorithm](size, num_bytes) if size > 1 else Cost(0, 0)


def hierarchical_cost(ranks: int, hosts: int, num_bytes: float) -> Cost:
    """Return the cost of a tree of `ranks` in the largest host and a chunked ring of `hosts`."""
    inside, across = (
        all_reduce_cost("tree", ranks, num_bytes),
        all_reduce_cost("chunked_ring", hosts, num_bytes),
    )
    return Cost(inside.num_rounds + across.num_rounds, inside.num_bytes + across.num_bytes)


def collective_cost(name: str, size: int, num_bytes: float) -> Cost:
    """Return the cost of another collective of `comm.collectives`; `num_bytes` is that of a rank's tensor.

    For reduce_scatter and all_to_all this is the size of all tensors of a rank together.
    """
    if size == 1:
        return Cost(0, 0)
    levels, others = math.ceil(math.log2(size)), size - 1
    rounds, moved = {
        "broadcast": (levels, levels * num_bytes),
        "reduce": (levels, levels * num_bytes),
        "reduce_scatter": (others, others / size * num_bytes),
        "all_gather": (others, others * num_bytes),
        "gather": (others, others * num_bytes),
        "scatter": (others, others * num_bytes),
        "all_to_all": (others, others / size * num_bytes),
        "barrier": (levels, levels),
    }[name]
    return Cost(rounds, moved)


def _ring(size: int, num_bytes: float) -> Cost:
    return Cost(size - 1, (size - 1) * num_bytes)


def _chunked_ring(size: int, num_bytes: float) -> Cost:
    return Cost(2 * (size - 1), 2 * (size - 1) / size * num_bytes)


def _tree(size: int, num_bytes: float) -> Cost:
    """Return the cost of the root, which receives, then sends, a whole tensor at each level."""
    levels = math.ceil(math.log2(size))
    return Cost(2 * levels, 2 * levels * num_bytes)


def _halving_doubling(size: int, num_bytes: float) -> Cost:
    """Return the cost of a rank that also takes the tensor of a rank above the power of two, if any."""
    levels = int(math.log2(size))
    paired = 2**levels
    extra = 2 if size > paired else 0
    return Cost(2 * levels + extra, (2 * (paired - 1) / paired + extra) * num_bytes)


_FORMULAS: dict[str, Callable[[int, float], Cost]] = {
    "ring": _ring,
    "chunked_ring": _chunked_ring,
    "tree": _tree,
    "halving_doubling": _halving_doubling,
}


def fit_link(costs: Sequence[Cost], seconds: Sequence[float]) -> Link | None:
    """Fit latency and bandwidth to measured times, by relative least squares.

    Returns None if the times give no bandwidth: all equal, or shorter for larger sizes.
    """
    if len({(cost.num_rounds, cost.num_bytes) for cost in costs}) < 2:
        return None
    # Normal equations of rounds/t * latency + bytes/t * (1/bandwidth) = 1.
    rows = [(c.num_rounds / t, c.num_bytes / t) for c, t in zip(costs, seconds, strict=True)]
    rr, rb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    r, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = rr * bb - rb * rb
    latency, per_byte = (r * bb - b * rb) / determinant, (b * rr - r * rb) / determinant
    if latency < 0:  # noise: small messages did not take longer per byte than large ones
        latency, per_byte = 0.0, b / bb
    return Link(latency, 1 / per_byte) if per_byte > 0 else None


def parse_rate(words: str) -> float:
    """Parse 10mbit, 2.5gbit or 800kbit, where 1 kbit is 1,000 bits a second; return bytes a second.

    Raises:
        InputError: The text has none of these forms, or the rate is 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg])bit", words.strip().lower())
    rate = float(found[1]) * 1000 ** ("kmg".index(found[2]) + 1) / 8 if found else 0.0
    if not rate:
        raise InputError(f"{words!r} is not a link rate", hint="write 100mbit, 2.5gbit or 800kbit")
    return rate
