"""`shoal bench gradsync`: compare strategies by time, bytes and loss, with `shoal train`."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from shoal.bench.cells import Cell, CellResult, Network, parse_way, run
from shoal.bench.hosts import TwoHosts, why_not
from shoal.bench.record import begin, describe
from shoal.bench.screen import make_table, show
from shoal.config.sync_rules import STRATEGIES
from shoal.errors import InputError, ShoalError, counted, nearest
from shoal.launch import forking
from shoal.plan.link_cost import parse_rate
from shoal.runtime.files import check_targets, write_json

LOCAL, HOSTS = "local", "hosts"
_BASE = "allreduce"
_TEXT = ("stdlib", "--vocab-size", "2048", "--limit", "150", "--split", "90,10,0")
_WIDE = 10  # losses with a larger ratio are plotted on a logarithmic scale
_IMAGES = ("random-images", "--limit", "5000", "--split", "90,10,0")
_COLOURED = ("random-images:3x32x32:10", *_IMAGES[1:])
_BATCH_STATISTICS = "model.batch_statistics"


@dataclass(frozen=True)
class Preset:
    """Built-in network: its configuration, and the data that is made if none is given."""

    config: str
    made_of: tuple[str, ...]
    global_batch_size: int
    eval_sequences: int
    settings: Mapping[str, str] = field(default_factory=dict)


NETWORKS = {
    "fcn-r": Preset("fcn-r", _IMAGES, 128, 500),
    "alexnet-r": Preset("alexnet-r", _COLOURED, 128, 500),
    "resnet-56": Preset("resnet-56", _COLOURED, 32, 128, {_BATCH_STATISTICS: "replica"}),
    "lstm": Preset("lstm", _TEXT, 64, 256),
    "gpt": Preset("tiny", _TEXT, 16, 64),
}


@dataclass(frozen=True)
class GridOptions:
    """What to measure."""

    strategies: tuple[str, ...]  # empty: all
    workers: tuple[int, ...]
    networks: tuple[str, ...]
    links: tuple[str, ...]
    steps: int
    global_batch_size: int  # 0: the network's default
    data: tuple[Path, ...]  # empty: made; else one for all networks, or one for each
    runs: Path | None  # None: a temporary folder


def command(options: GridOptions, output: Path | None, plot: Path | None) -> int:
    """Measure cell by cell and report, also after an interruption; return 1 if a cell failed."""
    check(options, output, plot)
    begin()
    forking.load()
    outcomes: list[CellResult] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_say, outcomes, options, output, plot)
        folder = options.runs or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True))
        )
        cells = plan(options, folder.absolute())
        for outcome in measure(cells, folder.absolute()):
            outcomes.append(outcome)
            if output is not None:
                write_json(output, report(outcomes, options))
    return int(any(outcome.status == "failed" for outcome in outcomes))


def check(options: GridOptions, output: Path | None, plot: Path | None) -> None:
    """Raise InputError for options that cannot be measured, before the first measurement."""
    for network in options.networks:
        if network not in NETWORKS:
            raise InputError(f"unknown network {network!r}", hint=nearest(network, NETWORKS))
    for word in options.strategies:
        parse_way(word, options.steps)
    for link in options.links:
        if link not in (LOCAL, HOSTS):
            parse_rate(link)
    if options.steps < 4 or min(options.workers) < 1:
        raise InputError(
            f"--steps {options.steps} --workers {min(options.workers)}: too few", hint="use 4 steps or more"
        )
    if len(options.data) not in (0, 1, len(options.networks)):
        raise InputError(
            f"--data names {len(options.data)} datasets for {len(options.networks)} networks",
            hint="give one dataset for each network, in the same order, or none to use small built-in ones",
        )
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib", hint="pip install 'shoal[report]'")
    check_targets(output, plot)


def plan(options: GridOptions, folder: Path) -> list[Cell]:
    """Return the cells. One worker has all-reduce on one host only, as there are no other replicas."""
    cells = []
    for number, name in enumerate(options.networks):
        known = NETWORKS[name]
        given = options.data[min(number, len(options.data) - 1)] if options.data else None
        data = given.absolute() if given else make_data(folder / "data", known.made_of)
        batch = options.global_batch_size or known.global_batch_size
        settings = {"eval.sequences": str(known.eval_sequences), **known.settings}
        network = Network(name, known.config, data, batch, settings)
        for workers in options.workers:
            for link in options.links if workers > 1 else (LOCAL,):
                words = (options.strategies or tuple(STRATEGIES)) if workers > 1 else (_BASE,)
                cells += [
                    Cell(network, parse_way(word, options.steps), workers, link, options.steps)
                    for word in words
                ]
    return cells


def make_data(folder: Path, made_of: tuple[str, ...]) -> Path:
    """Prepare a small dataset, unless it exists."""
    output = folder / made_of[0]
    words = [sys.executable, "-m", "shoal", "prepare", *made_of, "--output", str(output)]
    if not (output / "manifest.json").exists():
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ShoalError(
                f"no data could be made: {done.stderr.strip()}", hint="name a dataset with --data"
            )
    return output


def measure(cells: Sequence[Cell], folder: Path) -> Iterator[CellResult]:
    """Run the cells of each link one after the other; show on the terminal which one runs."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar, done = progress.add_task("starting", total=sum(cell.steps for cell in cells)), 0
        for link in dict.fromkeys(cell.link for cell in cells):
            with _hosts(link) as (hosts, reason):
                for cell in (cell for cell in cells if cell.link == link):
                    progress.update(bar, description=cell.name, completed=done)
                    there = replace(cell, slowed=bool(reason) and link != HOSTS)
                    if why := _why_not(there, hosts, reason):
                        yield CellResult(there, "refused", reason=why)
                    else:
                        yield run(there, folder, hosts, partial(_show, progress, bar, done))
                    done += cell.steps


def _why_not(cell: Cell, hosts: TwoHosts | None, reason: str) -> str:
    """Return why a cell cannot run. Without hosts, for `reason`, a transport may be slowed instead."""
    if hosts is not None and cell.workers % 2:
        return "two hosts need an even number"
    if not cell.slowed:
        return reason
    if cell.way.is_uncounted:
        return f"{reason}; delays in the transport would not slow it (allreduce:algorithm=ring would be)"
    return ""


def _show(progress: Progress, bar: TaskID, before: int, step: int) -> None:
    progress.update(bar, completed=before + step)


@contextlib.contextmanager
def _hosts(link: str) -> Iterator[tuple[TwoHosts | None, str]]:
    """Yield the hosts of a link, or the reason why there are none; neither for a local link."""
    rate = 0.0 if link in (LOCAL, HOSTS) else parse_rate(link)
    if link == LOCAL:
        yield None, ""
    elif reason := why_not(shaped=bool(rate)):
        yield None, reason
    else:
        try:
            hosts = TwoHosts(rate)
        except subprocess.CalledProcessError as error:
            yield None, f"this system makes no such link: {error.stderr.strip()}"
            return
        with hosts:
            yield hosts, ""


def report(outcomes: Sequence[CellResult], options: GridOptions) -> dict[str, Any]:
    """Return the record, with every sample."""
    asked = {
        "steps": options.steps,
        "links": options.links,
        "workers": options.workers,
        "networks": options.networks,
    }
    return {**describe("gradsync"), "asked": asked, "cells": [outcome.as_record() for outcome in outcomes]}


def _say(
    outcomes: Sequence[CellResult], options: GridOptions, output: Path | None, plot: Path | None
) -> None:
    for table in tables(outcomes):
        show(table)
    if outcomes and plot is not None:
        draw(outcomes, plot)


def groups(outcomes: Sequence[CellResult]) -> list[list[CellResult]]:
    """Group comparable results: the same network, number of workers, layout, link and length."""
    found: dict[tuple[str | int, ...], list[CellResult]] = {}
    for outcome in outcomes:
        cell = outcome.cell
        key = cell.network.name, cell.workers, cell.layout, cell.link, cell.slowed, cell.steps
        found.setdefault(key, []).append(outcome)
    return list(found.values())


def title(cell: Cell) -> str:
    """Return the title of a group: what its cells have in common."""
    workers = f"{cell.workers} workers on {_where(cell)}" if cell.workers > 1 else "1 worker"
    return f"{cell.network.name}: {workers}" + (f", {cell.layout}" if cell.layout else "")


def _where(cell: Cell) -> str:
    if cell.slowed:
        return f"one host, {cell.link} between halves by delays in the transport"
    between = f", {cell.link} between them" if cell.link not in (LOCAL, HOSTS) else ""
    return ("one host" if cell.link == LOCAL else "two hosts") + between


def tables(outcomes: Sequence[CellResult]) -> Iterator[Table]:
    """Yield a table for each group, then one over all numbers of workers for each network and link."""
    found: dict[tuple[str | int, ...], list[CellResult]] = {}
    for group in groups(outcomes):
        cell, alone = group[0].cell, _alone(group[0].cell, outcomes)
        yield _table(group, alone)
        if cell.workers > 1:
            found.setdefault((cell.network.name, _where(cell), cell.layout, cell.steps), []).extend(group)
    for several in found.values():
        alone = _alone(several[0].cell, outcomes)
        if alone is not None or len({outcome.cell.workers for outcome in several}) > 1:
            yield _by_workers(several, alone)


def _alone(cell: Cell, outcomes: Sequence[CellResult]) -> float | None:
    """Return the seconds a step of one worker with a cell's network and number of steps."""
    alike = (
        o for o in outcomes if (o.cell.network, o.cell.steps, o.cell.workers) == (cell.network, cell.steps, 1)
    )
    return next((outcome.found.seconds_a_step for outcome in alike if outcome.found), None)


def _by_workers(several: Sequence[CellResult], alone: float | None) -> Table:
    """Return the table of seconds a mini-batch by strategy and number of workers."""
    cell = several[0].cell
    title = f"seconds a mini-batch of {cell.network.global_batch_size} on {_where(cell)}"
    workers = sorted({outcome.cell.workers for outcome in several})
    headings = [counted(count, "worker") for count in (workers if alone is None else (1, *workers))]
    table = make_table(["strategy"], headings, title=f"{cell.network.name}: {title}")
    found = {(o.cell.way.word, o.cell.workers): o for o in several}
    for word in dict.fromkeys(word for word, _ in found):
        row = [found.get((word, count)) for count in workers]
        seconds = ("" if o is None else f"{o.found.seconds_a_step:.4f}" if o.found else o.status for o in row)
        table.add_row(word, *([] if alone is None else [f"{alone:.4f}"]), *seconds)
    return table


def _table(group: Sequence[CellResult], alone: float | None) -> Table:
    cell = group[0].cell
    batch, steps = cell.network.global_batch_size, cell.steps
    done = [outcome.found for outcome in group if outcome.found]
    shortest = min((found.total_s for found in done), default=0.0)
    base = next((o.found.seconds_a_step for o in group if o.found and o.cell.way.name == _BASE), None)
    notes = [f"{o.cell.way.word}: {o.status}: {o.reason}" for o in group if o.found is None]
    if any(found.bytes_a_step and not found.counted for found in done):
        notes.insert(0, "~ by the formula of a chunked ring; the back end's own traffic is not counted")
    if rule := cell.network.settings.get(_BATCH_STATISTICS):
        notes.insert(0, f"batch statistics: {rule} ({_BATCH_STATISTICS})")
    losses = (f"loss, {steps} steps", f"loss, {shortest:.3g} s")
    headings = ["s/mini-batch", "speed", "speed-up", "MB/step", "waiting", *losses]
    table = make_table(["strategy"], headings, notes, f"{title(cell)}, {batch} samples a mini-batch")
    for outcome in group:
        if (found := outcome.found) is None:
            table.add_row(outcome.cell.way.word, outcome.status)
            continue
        sent = found.bytes_a_step
        table.add_row(
            outcome.cell.way.word,
            f"{found.seconds_a_step:.4f}",
            *("" if one is None else f"{one / found.seconds_a_step:.2f}x" for one in (base, alone)),
            "?" if sent is None else f"{'~' if sent and not found.counted else ''}{sent / 1e6:.4g}",
            f"{found.communication_share:.0%}",
            f"{found.curve[-1].loss:.4f}",
            f"{found.loss_after(shortest):.4f}",
        )
    return table


def draw(outcomes: Sequence[CellResult], path: Path) -> None:
    """Plot for each group the loss over seconds a mini-batch, and its curves over epochs and seconds.

    The area of a point is its bytes; a line joins the Pareto-optimal points. Groups of one row, such as that
    of one worker, are left out if other groups have more.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shown = groups([outcome for outcome in outcomes if outcome.found])
    shown = [group for group in shown if len(group) > 1] or shown
    if not shown:
        return
    names = dict.fromkeys(outcome.cell.way.word for group in shown for outcome in group)
    colours = {name: colormaps["tab20"](number % 20) for number, name in enumerate(names)}
    figure = Figure(figsize=(16.5, 4.2 * len(shown)), layout="constrained")
    all_axes = figure.subplots(len(shown), 3, squeeze=False)
    for (axes, *by), group in zip(all_axes, shown, strict=True):
        axes.set(
            title=title(group[0].cell),
            xlabel="seconds a mini-batch",
            ylabel=f"loss after {group[0].cell.steps} steps",
        )
        points = [(o.found.seconds_a_step, o.found.curve[-1].loss) for o in group if o.found]
        most = max(o.found.bytes_a_step or 0 for o in group if o.found) or 1
        areas = [20 + 400 * (o.found.bytes_a_step or 0) / most for o in group if o.found]
        inks = [colours[outcome.cell.way.word] for outcome in group]
        axes.scatter([x for x, _ in points], [y for _, y in points], s=areas, c=inks, alpha=0.7)
        _spread(axes, [loss for _, loss in points])
        axes.plot(*zip(*pareto(points), strict=True), linewidth=0.8, linestyle="--", color="grey")
        axes.grid(alpha=0.3)
        for axes, name, unit in zip(by, ("epoch", "seconds"), ("epochs", "seconds"), strict=True):
            axes.set(xlabel=unit, ylabel="loss")
            for outcome, ink in zip(group, inks, strict=True):
                curve = outcome.found.curve if outcome.found else []
                axes.plot([getattr(p, name) for p in curve], [p.loss for p in curve], color=ink)
            _spread(axes, [point.loss for o in group if o.found for point in o.found.curve])
            axes.grid(alpha=0.3)
    marks = [Line2D([], [], marker="o", linestyle="", color=colour) for colour in colours.values()]
    figure.legend(marks, list(colours), loc="outside lower center", ncols=min(6, len(marks)))
    figure.suptitle("left: area is bytes a step; dashed: nothing is both faster and better")
    figure.savefig(path, dpi=120)


def _spread(axes: Any, losses: Sequence[float]) -> None:
    if max(losses) > _WIDE * min(losses):
        axes.set_yscale("log")


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both values, sorted by the first value."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best
