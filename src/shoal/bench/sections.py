"""What a report says of each kind of record: sentences computed from its rows, tables and pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from shoal.bench import pictures
from shoal.bench.ceilings import exchange_s, share
from shoal.bench.convergence import Epoch, epochs
from shoal.bench.layouts import SHOWN_PHASES
from shoal.bench.networks import Cell
from shoal.bench.pictures import Series
from shoal.bench.read_records import (
    CeilingsRecord,
    CollectivesRecord,
    ConvergenceRecord,
    GradsyncRecord,
    GradsyncRow,
    LayoutsRecord,
    NetworksRecord,
    NetworksRow,
    ProductsRecord,
    Spread,
    done,
)
from shoal.bench.sizes import in_words
from shoal.errors import counted
from shoal.page.pictures import bars
from shoal.page.render import Block, Picture, Table

_ENOUGH = 0.95  # the fewest threads with this part of the best speed are the knee
_CLOSE = 0.01  # relative; losses that differ by less do not differ
_DIVERGED = 1e9  # a loss beyond it is not drawn
_UNREPEATED = 0.1  # relative; times without a spread that differ by less do not differ
_AXES = tuple(name for name in ("batch", "threads", "workers") if name in {one.name for one in fields(Cell)})
_UNITS = {"batch": "batch size (samples)", "threads": "threads", "workers": "workers"}
_BASES = ("pytorch default", "allreduce", "backend")  # what others are compared with


def grouped(rows: Sequence[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return the rows by their keys, in the order in which they come."""
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def fastest(rows: Sequence[Any], what: str) -> str:
    """Say which row is the fastest, unless its range from p5 to p95 overlaps that of another one."""
    first, *others = sorted(rows, key=_median)
    if not others:
        return f"{first.label} takes {first.spread.median:.3g} s a mini-batch for {what}."
    if equal := [row.label for row in others if row.spread.overlaps(first.spread)]:
        return f"No clear difference between {_and([first.label, *equal])} for {what}: p5 to p95 overlap."
    other = next((row for row in others if row.label in _BASES), others[0])
    ratio = other.spread.median / first.spread.median
    return f"{first.label} is the fastest for {what}: {ratio:.3g} times the speed of {other.label}."


def _median(row: Any) -> float:
    return float(row.spread.median)


def _and(words: Sequence[str], most: int = 4) -> str:
    shown = [*words[:most], *[f"{len(words) - most} more"] * (len(words) > most)]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def answer(rows: Sequence[NetworksRow]) -> str:
    """Say which framework, how many threads and which batch size are the fastest here; empty if unknown.

    Settings are compared by the geometric mean of samples/s over the networks, if they have all of them.
    """
    found: dict[tuple[str, int, int], dict[str, NetworksRow]] = {}
    for row in done(rows):
        if getattr(row.cell, "workers", 1) == 1:
            found.setdefault((row.label, row.cell.threads, row.cell.batch), {})[row.group] = row
    if not found:
        return ""
    whole = max((one.keys() for one in found.values()), key=len)
    speed = {
        key: statistics.geometric_mean(row.rate.median for row in own.values())
        for key, own in found.items()
        if own.keys() == whole
    }
    best = max(speed, key=lambda key: speed[key])
    alike = [key for key in speed if key[::2] == best[::2] and speed[key] >= _ENOUGH * speed[best]]
    label, threads, batch = chosen = min(alike, key=lambda key: key[1])
    told, where = f"Here: {label}, {counted(threads, 'thread')}, batch size {batch}", _and(sorted(whole))
    others = sorted(
        (key for key in speed if key[1:] == chosen[1:] and key != chosen), key=lambda k: -speed[k]
    )
    if not others:
        return f"{told} ({where})."
    other = next((key for key in others if key[0] in _BASES), others[0])
    if all(row.spread.overlaps(found[other][name].spread) for name, row in found[chosen].items()):
        return f"{told}; no clear difference to {other[0]} ({where})."
    return f"{told}: {speed[chosen] / speed[other]:.3g} times the samples/s of {other[0]} ({where})."


def networks(record: NetworksRecord) -> Iterator[Block]:
    """Yield seconds a mini-batch by framework, speed along each setting, losses, memory and power."""
    rows = done(record.rows)
    labels = list(dict.fromkeys(row.label for row in rows))
    lines = []
    for setting, own in grouped(
        rows, lambda row: (row.group, *(getattr(row.cell, a) for a in _AXES))
    ).items():
        times = {row.label: _time(row.spread) for row in own}
        best = min(own, key=_median).label
        cells = ("*" * (label == best) + times.get(label, "") for label in labels)
        lines.append([*map(str, setting), *cells])
    yield Table("Seconds a mini-batch", ["network", *_AXES, *labels], lines, "Median; p5 to p95 below.")
    for name, own in grouped(rows, lambda row: row.group).items():
        for axis in _AXES:
            yield from _along(axis, name, own)
        yield from _losses(name, own)
    yield from _resources(rows)
    yield from left_out(record.rows)


def _time(one: Spread) -> str:
    return f"{one.median:.4g}\n{one.low:.3g} to {one.high:.3g}"


def _along(axis: str, name: str, rows: Sequence[NetworksRow]) -> Iterator[Picture]:
    """Yield the speed along one setting, at those values of the others for which most was measured."""
    rest = [other for other in _AXES if other != axis]
    settings = grouped(rows, lambda row: tuple(getattr(row.cell, other) for other in rest))
    values = {key: sorted({getattr(row.cell, axis) for row in own}) for key, own in settings.items()}
    fixed = max(values, key=lambda key: (len(values[key]), key))
    if len(values[fixed]) < 2 and axis != "batch":
        return
    series, knees = [], []
    for label, own in grouped(settings[fixed], lambda row: row.label).items():
        points = sorted((float(getattr(row.cell, axis)), row.rate) for row in own)
        best = max(rate.median for _, rate in points)
        knee = next(x for x, rate in points if rate.median >= _ENOUGH * best)
        series.append(Series(label, points, knee if axis == "threads" else None))
        knees.append(f"{label} {knee:g}")
    most = values[fixed][-1]
    last = [row for row in settings[fixed] if getattr(row.cell, axis) == most]
    if axis == "threads":
        sentence = f"Fewest threads within 5 % of the best for {name}: {_and(knees)}."
    else:
        sentence = fastest(last, f"{name} with {_told(axis, most)}")
    caption = f"{name}, {', '.join(map(_told, rest, fixed))}.{pictures.remark(series)}"
    picture = pictures.lines(series, _UNITS[axis], "samples/s")
    yield Picture(sentence, picture, caption + " Rings: the fewest threads." * (axis == "threads"))


def _told(axis: str, value: int) -> str:
    return f"batch size {value}" if axis == "batch" else counted(value, axis[:-1])


def _losses(name: str, rows: Sequence[NetworksRow]) -> Iterator[Picture]:
    """Yield the losses of frameworks that trained on the same batches, and how far they agree."""
    batch, own = max(grouped(rows, lambda row: row.cell.batch).items())
    curves = {row.label: row.losses for row in own if row.losses and all(map(_is_drawn, row.losses))}
    if len(curves) < 2:
        return
    steps = list(zip(*curves.values(), strict=False))
    apart = max((max(losses) - min(losses)) / (abs(max(losses)) or 1) for losses in steps)
    series = [_curve(label, list(enumerate(ys[: len(steps)], 1))) for label, ys in curves.items()]
    sentence = (
        f"The losses of {name} in {len(curves)} frameworks and modes agree to {apart:.1e} of their value"
    )
    picture = pictures.lines(series, "step", "training loss (nats)", scale="linear")
    caption = f"{name}, batch size {batch}, the same weights and samples."
    yield Picture(f"{sentence} over {counted(len(steps), 'step')}.", picture, caption)


def _is_drawn(loss: float) -> bool:
    return abs(loss) < _DIVERGED  # nor is what is no number


def _curve(label: str, points: Sequence[tuple[float, float]]) -> Series:
    return Series(label, [(x, Spread(y, y, y)) for x, y in points])


def _resources(rows: Sequence[NetworksRow]) -> Iterator[Table]:
    """Yield speed, memory, clock and power of each row; what no row has is left out."""
    lines = []
    for row in rows:
        clocks, watts = (
            row.sensors.get("cpu_mhz"),
            [row.sensors.get(f"mean_{d}_watts") for d in ("cpu", "gpu")],
        )
        power = sum(w for w in watts if isinstance(w, int | float))
        least = (
            min((mhz for mhz in clocks if isinstance(mhz, int | float)), default=0)
            if isinstance(clocks, list)
            else 0
        )
        rate = row.rate.median
        lines.append((row.name, rate, row.peak_bytes / 1e6, least, power, rate / power if power > 0 else 0))
    headings = ("row", "samples/s", "peak MB", "lowest MHz", "W", "samples/s per W")
    known = [column for column in range(len(headings)) if any(line[column] for line in lines)]
    if len(known) > 2:
        shown = [[_number(line[column]) for column in known] for line in lines]
        note = "Memory, clock and power of the process and the machine while a row was measured."
        yield Table("Memory, clock and power", [headings[column] for column in known], shown, note)


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if value else ""


def left_out(rows: Sequence[Any]) -> Iterator[Table]:
    """Yield the rows that have no result, with the reason of each."""
    if lines := [[row.name, row.status, row.reason] for row in rows if row.status != "done"]:
        yield Table("Rows without a result", ("row", "status", "reason"), lines)


def gradsync(record: GradsyncRecord) -> Iterator[Block]:
    """Yield seconds a mini-batch by strategy and workers, bytes and waiting, loss by step and by second."""
    rows = done(record.cells)
    alone = {(row.network, row.global_batch_size): row for row in rows if row.workers == 1}
    for group, own in grouped([row for row in rows if row.workers > 1], lambda row: row.group).items():
        base = alone.get((own[0].network, own[0].global_batch_size))
        counts = sorted({row.workers for row in own})
        strategies = grouped(own, lambda row: row.label)
        yield _workers_table(group, strategies, counts, base)
        if len(counts) > 1:
            series = [
                Series(label, sorted((row.workers, row.spread) for row in (*found, *filter(None, (base,)))))
                for label, found in strategies.items()
            ]
            best = min(own, key=_median)
            sentence = f"The least time: {best.label} with {counted(best.workers, 'worker')}"
            if base:
                sentence += f", {_median(base) / _median(best):.3g} times the speed of one worker"
            if base and best.spread.high >= base.spread.low:
                sentence = f"No strategy is clearly faster than one worker. {sentence}"
            picture = pictures.lines(series, "workers", "seconds a mini-batch")
            yield Picture(f"{sentence}.", picture, f"{group}.{pictures.remark(series)}")
        last = sorted((row for row in own if row.workers == counts[-1]), key=_median)
        where = f"{group}, {counts[-1]} workers"
        yield _exchange(where, last)
        yield from _convergence(where, last)
    yield from left_out(record.cells)


def _workers_table(
    group: str, strategies: dict[str, list[GradsyncRow]], counts: list[int], base: Any
) -> Table:
    lines = [["one worker", _time(base.spread), *[""] * (len(counts) + 3)]] if base else []
    for label, own in strategies.items():
        found = {row.workers: row for row in own}
        times = (_time(found[count].spread) if count in found else "" for count in counts)
        speed = f"{_median(base) / _median(own[-1]):.2f}" if base else ""
        lines.append(
            [
                label,
                *[""] * bool(base),
                *times,
                speed,
                _megabytes(own[-1]),
                f"{own[-1].communication_share:.0%}",
            ]
        )
    headings = ["strategy", *["1"] * bool(base), *map(str, counts), "speed-up", "MB/step", "waiting"]
    note = f"Median, p5 to p95 below, by workers. Speed-up over one worker, MB and waiting with {counts[-1]}."
    return Table(f"Seconds a mini-batch: {group}", headings, lines, note)


def _megabytes(row: GradsyncRow) -> str:
    mark = "" if row.counted or not row.bytes_a_step else "~"
    return "?" if row.bytes_a_step is None else f"{mark}{row.bytes_a_step / 1e6:.4g}"


def _exchange(where: str, rows: Sequence[GradsyncRow]) -> Picture:
    """Return the seconds of each strategy, in computing and waiting, with the bytes that a step sends."""
    sentence = fastest(rows, where)
    sent = {row.label: row.bytes_a_step for row in rows if row.bytes_a_step}
    if "allreduce" in sent and (least := min(sent, key=lambda label: sent[label])) != "allreduce":
        sentence += f" {least} sends {sent['allreduce'] / sent[least]:.3g} times fewer bytes than allreduce."
    waiting = [_median(row) * min(max(row.communication_share, 0), 1) for row in rows]
    busy = [_median(row) - wait for row, wait in zip(rows, waiting, strict=True)]
    notes = [f"{_megabytes(row)} MB" for row in rows]
    parts: dict[str, Sequence[float]] = {"computing": busy, "waiting for others": waiting}
    picture = bars([row.label for row in rows], parts, notes, "seconds a mini-batch")
    return Picture(sentence, picture, f"{where}. MB: sent by a worker a step; ~ by formula, ? not counted.")


def _convergence(where: str, rows: Sequence[GradsyncRow]) -> Iterator[Picture]:
    """Yield the loss by step and by second; which is least, at the end and when the fastest is done."""
    curves = {row.label: [point for point in row.curve if _is_drawn(point.loss)] for row in rows}
    curves = {label: points for label, points in curves.items() if points}
    if not curves:
        return
    first_done = min(points[-1].seconds for points in curves.values())
    last = max(points[-1].step for points in curves.values())
    ends = {"step": (last, counted(last, "step")), "seconds": (first_done, f"{first_done:.3g} s")}
    for axis, (end, told) in ends.items():
        reached = {label: [p.loss for p in ps if getattr(p, axis) <= end] for label, ps in curves.items()}
        losses = {label: found[-1] for label, found in reached.items() if found}
        least, *others = sorted(losses, key=lambda label: losses[label])
        equal = [other for other in others if losses[other] - losses[least] <= _CLOSE * abs(losses[least])]
        sentence = f"After {told}, {least} has the lowest loss: {losses[least]:.4g}."
        if equal:
            sentence = f"After {told}, the lowest losses are less than 1 % apart: {_and([least, *equal])}."
        series = [_curve(label, [(getattr(p, axis), p.loss) for p in ps]) for label, ps in curves.items()]
        xlabel = {"step": "step", "seconds": "training time (s)"}[axis]
        picture = pictures.lines(series, xlabel, "validation loss (nats)", scale="linear")
        yield Picture(sentence, picture, f"{where}.{pictures.remark(series)}")


def collectives(record: CollectivesRecord) -> Iterator[Block]:
    """Yield bandwidth by size of each algorithm."""
    algorithms = grouped(record.rows, lambda row: row.algorithm)
    sizes = sorted({row.size for row in record.rows})
    times = {(row.size, row.algorithm): row.time_s for row in record.rows}
    largest = sorted((row for row in record.rows if row.size == sizes[-1]), key=lambda row: row.time_s)
    first, others = largest[0], largest[1:]
    where = f"{in_words(sizes[-1])} on {counted(record.ranks, 'rank')}"
    sentence = f"{first.algorithm} is the fastest for {where}: {first.busbw_bytes_per_s / 1e9:.3g} GB/s"
    if close := [row.algorithm for row in others if row.time_s < (1 + _UNREPEATED) * first.time_s]:
        sentence = f"Less than 10 % apart, no clear difference for {where}: {_and([first.algorithm, *close])}"
    elif other := next((row for row in others if row.algorithm in _BASES), None):
        sentence += f", {other.time_s / first.time_s:.3g} times the speed of {other.algorithm}"
    if wrong := sorted({row.algorithm for row in record.rows if row.wrong}):
        sentence = f"Wrong sums by {_and(wrong)}. {sentence}"
    series = [
        _curve(name, sorted((row.size / 1e6, row.busbw_bytes_per_s / 1e9) for row in own))
        for name, own in algorithms.items()
    ]
    picture = pictures.lines(series, "size (MB)", "bus bandwidth (GB/s)", scale="log")
    yield Picture(f"{sentence}.", picture, f"All-reduce of {record.dtype}, transport {record.transport}.")
    lines = [
        [in_words(size), *(_number(1e3 * times.get((size, name), 0)) for name in algorithms)]
        for size in sizes
    ]
    fits = [
        f"{name} {1e6 * link.latency_s:,.0f} us, {link.bytes_per_s / 1e9:.3g} GB/s"
        for name, link in record.links.items()
        if link
    ]
    note = "Fitted latency and bandwidth: " + "; ".join(fits) if fits else ""
    yield Table("Milliseconds an all-reduce", ["size", *algorithms], lines, note)


def shares(record: NetworksRecord, machine: CeilingsRecord) -> Iterator[Table]:
    """Yield each row's share of the matrix rate, and its gradients' time on the link beside its step."""
    lines, device = [], str(record.options.get("device", "cpu"))
    for row in done(record.rows):
        done_per_s = 3 * row.multiply_adds * row.rate.median
        part = share(done_per_s, machine.rows, threads=row.cell.threads, device=device)
        link = exchange_s(row.parameters, machine.rows)
        times = [_number(1e3 * row.spread.median), _number(4e-6 * row.parameters), _number(1e3 * (link or 0))]
        lines.append([row.name, f"{part:.0%}" if part and row.multiply_adds else "", *times])
    headings = ("row", "of the matrix rate", "ms a step", "MB of gradients", "ms on the link")
    note = f"Rates of {machine.path.name}. Multiply-adds of a step: three times those of the forward pass."
    yield Table("Share of what this machine can do", headings, lines, note)


def ceilings(record: CeilingsRecord) -> Iterator[Block]:
    """Yield the rates of the machine."""
    lines = [
        [row.what, row.device, row.kind, f"{row.threads or ''}", _number(row.rate / 1e9) or row.reason]
        for row in record.rows
    ]
    note = "GFLOP/s of matmul, GB/s of all others, by the median."
    yield Table("Rates of this machine", ("", "device", "kind", "threads", "rate"), lines, note)


def products(record: ProductsRecord) -> Iterator[Block]:
    """Yield the ways to compute each product, in milliseconds."""
    for group, own in grouped(record.rows, lambda row: row.group).items():
        timed = sorted((row for row in own if row.samples), key=lambda row: statistics.median(row.samples))
        if timed:
            ms = [1e3 * statistics.median(row.samples) for row in timed]
            sentence = f"{timed[0].way} takes the least time for {group}: {ms[0]:.3g} ms"
            sentence += f", {timed[-1].way} {ms[-1] / ms[0]:.3g} times as long" * (len(ms) > 1)
            notes = [f"{row.flop / time / 1e6:.3g} GFLOP/s" for row, time in zip(timed, ms, strict=True)]
            picture = bars([row.way for row in timed], {"ms": ms}, notes, "ms")
            yield Picture(f"{sentence}.", picture, f"{group}, medians. GFLOP/s of the direct formula.")
    lines = [[row.group, row.way, row.reason] for row in record.rows if row.reason]
    if lines:
        yield Table("Ways without a result", ("product", "way", "reason"), lines)


def layouts(record: LayoutsRecord) -> Iterator[Block]:
    """Yield time by phase, memory and losses of each layout."""
    rows = done(record.rows)
    if rows:
        times = [row.parts() for row in rows]
        best = min(range(len(rows)), key=lambda number: times[number]["step"])
        phases: dict[str, Sequence[float]] = {
            name: [max(0, one[name]) for one in times] for name in times[0] if name in SHOWN_PHASES
        }
        notes = [f"{row.peak_bytes / 1e6:,.0f} MB" for row in rows]
        picture = bars([row.layout for row in rows], phases, notes, "ms a step")
        sentence = f"{rows[best].layout} has the shortest mean step: {times[best]['step']:.3g} ms."
        yield Picture(sentence, picture, "Phases of rank 0. MB: peak memory of the rank that needs most.")
        texts = [row.texts(rows[0], record.options) for row in rows]
        labels = dict.fromkeys(label for each in texts for label in each)
        lines = [[label, *(each.get(label, "") for each in texts)] for label in labels]
        yield Table("Layouts side by side", ["", *(row.layout for row in rows)], lines)
    yield from left_out(record.rows)


def convergence(record: ConvergenceRecord) -> Iterator[Block]:
    """Yield training loss and accuracy by epoch, and accuracy by second; bands are those of all seeds."""
    networks = grouped(done(record.cells), lambda row: (row.network.rpartition(" seed ")[0], row.workers))
    for name in dict.fromkeys(name for name, _ in networks):
        seen = {w: list(epochs(own)) for (network, w), own in networks.items() if network == name}
        seen = {workers: found for workers, found in seen.items() if found}
        panels: tuple[tuple[str, str, Callable[[Epoch], list[float]]], ...] = (
            ("epoch", "training loss (nats)", lambda one: one.training_loss),
            ("epoch", "accuracy", lambda one: one.accuracy),
            ("training time (s)", "accuracy", lambda one: one.accuracy),
        )
        for below, beside, values in panels:
            series, ends = [], []
            for workers, found in seen.items():
                points = [
                    (one.epoch if below == "epoch" else statistics.fmean(one.seconds), _of_seeds(values(one)))
                    for one in found
                    if values(one) and all(map(_is_drawn, values(one)))
                ]
                label = counted(workers, "worker")
                if points:
                    series.append(Series(label, points))
                    end, x = points[-1][1], points[-1][0]
                    at = f"epoch {x:.1f}" if below == "epoch" else f"{x:.3g} s"
                    ends.append(f"{end.median:.4g} ({end.low:.4g} to {end.high:.4g}) with {label} at {at}")
            if series:
                picture = pictures.lines(series, below, beside, scale="linear")
                sentence = f"{beside.partition(' (')[0].capitalize()} of {name}: {_and(ends)}."
                yield Picture(sentence, picture, f"{name}. Mean of the seeds; bands: all seeds.")
    yield from left_out(record.cells)


def _of_seeds(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), min(values), max(values))


# A new kind of record needs its schema in read_records.SCHEMAS and its section here.
SECTIONS: dict[str, Callable[[Any], Iterator[Block]]] = {
    "networks": networks,
    "gradsync": gradsync,
    "collectives": collectives,
    "convergence": convergence,
    "layouts": layouts,
    "ceilings": ceilings,
    "products": products,
}
