"""How many micro-batches each stage of a rank holds when a backward pass begins (no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.config.layout import Layout


@dataclass(frozen=True)
class InFlight:
    """Micro-batches of each of a rank's stages whose activations are held."""

    counts: tuple[int, ...]
    stage: int  # whose backward pass begins
    first: bool  # no gradient is there yet


def in_flight(layout: Layout, rank: int, num_microbatches: int) -> list[InFlight]:
    """Return what is held at the first backward pass, and where most is held in later ones.

    Orders are those of torch.distributed.pipelining.schedules: GPipe (Huang et al. 2019), 1F1B (Narayanan et
    al. 2019), interleaved (Narayanan et al. 2021) and ZB-H1 (Qi et al. 2023).
    """
    return _largest(_backward_passes(layout, rank, num_microbatches))


def _largest(passes: Iterator[InFlight]) -> list[InFlight]:
    kept: dict[tuple[int, bool], InFlight] = {}
    for one in passes:
        key = one.stage, one.first
        if key not in kept or sum(one.counts) > sum(kept[key].counts):
            kept[key] = one
    return list(kept.values())


def _backward_passes(layout: Layout, rank: int, count: int) -> Iterator[InFlight]:
    if layout.pp == 1:
        yield from (InFlight((1,), 0, first=first) for first in ([True, False] if count > 1 else [True]))
    elif layout.schedule in ("gpipe", "1f1b"):
        most = count if layout.schedule == "gpipe" else min(count, layout.pp - rank)
        yield InFlight((most,), 0, first=True)
        if count > 1:
            yield InFlight((most if count > most else most - 1,), 0, first=False)
    else:
        yield from _two_stages(layout, rank, count)


def _two_stages(layout: Layout, rank: int, count: int) -> Iterator[InFlight]:
    """Follow the first rounds of the schedules with two stages a rank; later ones repeat."""
    split = layout.schedule == "zero_bubble"
    a_round = count // max(1, count // layout.pp)
    warmup = min(a_round + (1 if split else 2) * (layout.pp - 1 - rank), 2 * count)
    held = [0, 0]
    waiting: list[int] = []  # stages whose weights' gradients are put off
    for op in range(min(2 * count + warmup, warmup + 4 * a_round + layout.pp)):
        if op < 2 * count:
            held[op // a_round % 2] += 1
        if op >= warmup:
            stage = 1 - (op - warmup) // a_round % 2
            yield InFlight((held[0], held[1]), stage, first=op == warmup)
            waiting.append(stage)
            if not split or op - warmup >= rank:
                held[waiting.pop(0)] -= 1
