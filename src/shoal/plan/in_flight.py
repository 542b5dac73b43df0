"""How many micro-batches each stage of a rank holds when a backward pass begins (no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.config.layout import Layout


@dataclass(frozen=True)
class InFlight:
    """What is held when a backward pass of one stage begins; tuples are by stage of the rank."""

    counts: tuple[int, ...]  # micro-batches whose activations are held
    stage: int  # whose backward pass begins
    done: tuple[int, ...]  # backward passes so far, with all gradients
    follows_forward: bool  # the newest of them has just been through its forward pass
    put_off: tuple[int, ...] = (0, 0)  # micro-batches whose gradients of weights are still to come


def in_flight(layout: Layout, rank: int, num_microbatches: int) -> list[InFlight]:
    """Return what is held at each stage's first backward pass, and where most is held in later ones.

    Orders are those of torch.distributed.pipelining.schedules: GPipe (Huang et al. 2019), 1F1B (Narayanan et
    al. 2019), interleaved (Narayanan et al. 2021) and ZB-H1 (Qi et al. 2023).
    """
    kept: dict[tuple[object, ...], InFlight] = {}
    for one in _backward_passes(layout, rank, num_microbatches):
        is_last = one.done[one.stage] == num_microbatches - 1
        key = one.stage, tuple(map(bool, one.done)), one.follows_forward, is_last
        for order in (sum, _of_last):  # the last stage may hold logits
            place = *key, order
            if place not in kept or order(one.counts) > order(kept[place].counts):
                kept[place] = one
    return list(dict.fromkeys(kept.values()))


def _of_last(counts: tuple[int, ...]) -> int:
    return counts[-1]


def _backward_passes(layout: Layout, rank: int, count: int) -> Iterator[InFlight]:
    if layout.stages > layout.pp:
        yield from _two_stages(layout, rank, count)
        return
    ahead = layout.pp - rank if layout.schedule == "1f1b" or layout.pp == 1 else count
    for done in sorted({*range(min(count, 3)), count - 1}):
        held = min(ahead, count - done)
        yield InFlight((held,), 0, (done,), done == 0 or held == ahead < count)


def _two_stages(layout: Layout, rank: int, count: int) -> Iterator[InFlight]:
    """Follow the first rounds of the schedules with two stages a rank; later ones repeat."""
    split = layout.schedule == "zero_bubble"
    a_round = count // max(1, count // layout.pp)
    warmup = min(a_round + (1 if split else 2) * (layout.pp - 1 - rank), 2 * count)
    held, done = [0, 0], [0, 0]
    waiting: list[int] = []  # stages whose gradients of weights are put off
    for op in range(min(2 * count, 4 * a_round) + warmup):
        if op < 2 * count:
            held[op // a_round % 2] += 1
        if op >= warmup:
            stage = 1 - (op - warmup) // a_round % 2
            put_off = waiting.count(0), waiting.count(1)
            yield InFlight((held[0], held[1]), stage, (done[0], done[1]), op < 2 * count, put_off)
            waiting.append(stage)
            if not split or op - warmup >= rank:
                held[waiting[0]] -= 1
                done[waiting.pop(0)] += 1
    yield InFlight((1, 1), 1, (count - 1, count - 1), False)
    yield InFlight((1, 0), 0, (count - 1, count), False)
