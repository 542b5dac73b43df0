"""`shoal bench convergence`: training loss and test accuracy by epoch and by second, over several seeds."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from shoal.bench.cells import Cell, CellResult, Network, parse_way
from shoal.bench.gradsync import LOCAL, NETWORKS, make_data, measure
from shoal.bench.measured import MeasuredRun
from shoal.bench.record import begin, describe
from shoal.bench.screen import make_table, show
from shoal.config.load import load_config
from shoal.data.prepare.images import RANDOM
from shoal.errors import InputError, counted
from shoal.launch import forking
from shoal.networks.description import names, read
from shoal.runtime.files import check_targets, read_json, write_json
from shoal.tasks.choose import open_task

_DIGITS = ("sklearn-digits", "--split", "80,20,0")
_COLOURED = ("sklearn-digits-32", *_DIGITS[1:])
_SHOWN = 12  # epochs of a table
_MOST_TOKENS = 256  # sequences per validation of a network on tokens


@dataclass(frozen=True)
class ConvergenceOptions:
    """What is trained: every network with every number of workers and every seed."""

    networks: tuple[str, ...]
    data: tuple[Path, ...]  # empty: made; else one for all networks, or one for each
    epochs: int
    seeds: int
    workers: tuple[int, ...]
    batch_size: int  # over all workers
    settings: dict[str, str]  # of `shoal train`
    runs: Path | None  # None: a temporary folder

    def check(self) -> None:
        """Raise an InputError for what cannot be measured."""
        if min(self.epochs, self.seeds, self.batch_size, *self.workers) < 1:
            raise InputError("epochs, seeds, workers and the batch size must be at least 1")
        if len(self.data) not in (0, 1, len(self.networks)):
            raise InputError(
                f"--data names {counted(len(self.data), 'dataset')} for "
                f"{counted(len(self.networks), 'network')}",
                hint="give one dataset for all networks, or one for each in the same order",
            )
        for path in self.data:
            _refuse_random(path)


def _refuse_random(path: Path) -> None:
    manifest = read_json(path / "manifest.json", "dataset's manifest")
    inputs = manifest.get("inputs", {}) if isinstance(manifest, dict) else {}
    named = inputs.get("inputs", []) if isinstance(inputs, dict) else []
    if any(str(name).partition(":")[0] == RANDOM for name in named):
        raise InputError(
            f"{path} has random images, of which nothing can be learned",
            hint="use real data, such as shoal prepare sklearn-digits --output digits",
        )


def plan(options: ConvergenceOptions, folder: Path) -> list[Cell]:
    """Return the trainings; each is evaluated about once an epoch, on the whole validation split."""
    cells = []
    for number, name in enumerate(options.networks):
        network = read(name)
        made_of = (
            NETWORKS["lstm"].made_of if network.tokens else _DIGITS if network.input[0] == 1 else _COLOURED
        )
        given = options.data[min(number, len(options.data) - 1)] if options.data else None
        data = given.absolute() if given else make_data(folder / "data", made_of)
        shipped = name in names()
        preset = name if shipped else "lstm" if network.tokens else "fcn-r"
        own = {} if shipped else {"model.network": str(Path(name).absolute())}
        config = load_config(
            preset, {"data": {"datasets": [str(data)]}, "model": {"network": own.get("model.network", name)}}
        )
        train, held_out = (
            int(open_task(config).data.samples(split).counts.sum()) for split in ("train", "validation")
        )
        per_epoch = math.ceil(train / options.batch_size)
        settings = {
            "eval.every": str(per_epoch),
            "eval.sequences": str(min(held_out, _MOST_TOKENS) if network.tokens else held_out),
            **own,
            **options.settings,
        }
        for workers, seed in itertools.product(options.workers, range(1, options.seeds + 1)):
            seeded = Network(
                f"{Path(name).stem} seed {seed}",
                preset,
                data,
                options.batch_size,
                settings | {"train.seed": str(seed)},
            )
            steps = per_epoch * options.epochs
            cells.append(Cell(seeded, parse_way("allreduce", steps), workers, LOCAL, steps))
    return cells


def command(options: ConvergenceOptions, output: Path | None, plot: Path | None) -> int:
    """Train, and report also after an interruption; return 1 if a training failed."""
    options.check()
    check_targets(output, plot)
    begin()
    forking.load()
    found: list[CellResult] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_say, found, plot)
        folder = options.runs or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True))
        )
        for result in measure(plan(options, folder.absolute()), folder.absolute()):
            found.append(result)
            if output is not None:
                write_json(output, {**describe("convergence"), "cells": [one.as_record() for one in found]})
    return int(any(result.found is None for result in found))


def _say(found: Sequence[CellResult], plot: Path | None) -> None:
    for name, results in groups(found):
        show(table(name, results))
    if plot is not None and any(result.found for result in found):
        draw(found, plot)


def groups(found: Sequence[CellResult]) -> list[tuple[str, list[CellResult]]]:
    """Return the results by network and workers: those that differ in the seed alone."""
    alike: dict[str, list[CellResult]] = {}
    for result in found:
        workers = counted(result.cell.workers, "worker")
        network = result.cell.network.name.rpartition(" seed ")[0]
        alike.setdefault(f"{network}, {workers}", []).append(result)
    return list(alike.items())


def runs_of(results: Sequence[CellResult]) -> list[MeasuredRun]:
    """Return the runs that ended well."""
    return [result.found for result in results if result.found]


@dataclass(frozen=True)
class Epoch:
    """An evaluation, over all seeds."""

    epoch: float
    seconds: list[float]
    training_loss: list[float]  # mean of the steps since the evaluation before
    loss: list[float]
    accuracy: list[float]


def epochs(runs: Sequence[Any]) -> Iterator[Epoch]:
    """Yield the evaluations that all runs have; a run has a `curve`, and `losses` by step."""
    for points in zip(*(itertools.pairwise(run.curve) for run in runs), strict=False):
        yield Epoch(
            points[0][1].epoch,
            [now.seconds for _, now in points],
            [
                statistics.fmean(run.losses[before.step : now.step])
                for run, (before, now) in zip(runs, points, strict=True)
            ],
            [now.loss for _, now in points],
            [now.accuracy for _, now in points if now.accuracy is not None],
        )


def _spread(values: Sequence[float], form: str) -> str:
    """Write the mean, and with several values their standard deviation."""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {format(statistics.stdev(values), form)}"


def table(name: str, results: Sequence[CellResult]) -> Table:
    """Return at most a dozen epochs with the mean over the seeds."""
    seen = list(epochs(runs_of(results)))
    batch = results[0].cell.network.global_batch_size
    seeds = counted(sum(result.found is not None for result in results), "seed")
    notes = [f"{r.cell.network.name}: {r.status}: {r.reason}" for r in results if r.found is None]
    headings = ["epoch", "seconds", "training loss", "validation loss", "accuracy"]
    title = f"{name}, batch {batch}, {seeds}: mean ± standard deviation"
    shown = make_table([], headings, notes, title)
    every = math.ceil(len(seen) / _SHOWN) or 1
    for one in seen[(len(seen) - 1) % every :: every]:  # the last one among them
        shown.add_row(
            f"{one.epoch:.1f}",
            _spread(one.seconds, ".1f"),
            _spread(one.training_loss, ".4f"),
            _spread(one.loss, ".4f"),
            _spread(one.accuracy, ".2%"),
        )
    return shown


def draw(found: Sequence[CellResult], path: Path) -> None:
    """Plot each network's training loss by epoch, and accuracy by epoch and by second; bands: all seeds."""
    from matplotlib.figure import Figure

    by_network: dict[str, list[tuple[str, list[Epoch]]]] = {}
    for name, results in groups(found):
        network, _, workers = name.partition(", ")
        if seen := list(epochs(runs_of(results))):
            by_network.setdefault(network, []).append((workers, seen))
    panels: tuple[tuple[str, str, Any], ...] = (
        ("epoch", "training loss", lambda one: one.training_loss),
        ("epoch", "accuracy", lambda one: one.accuracy),
        ("seconds of training", "accuracy", lambda one: one.accuracy),
    )
    figure = Figure(figsize=(12, 3.4 * len(by_network)), layout="constrained")
    grid = figure.subplots(len(by_network), len(panels), squeeze=False)
    for row, (network, lines) in zip(grid, by_network.items(), strict=True):
        for axes, (below, beside, values) in zip(row, panels, strict=True):
            axes.set(title=network, xlabel=below, ylabel=beside)
            axes.grid(alpha=0.3)
            for workers, seen in lines:
                x = [one.epoch if below == "epoch" else statistics.fmean(one.seconds) for one in seen]
                axes.plot(x, [statistics.fmean(values(one)) for one in seen], label=workers)
                lows, highs = ([end(values(one)) for one in seen] for end in (min, max))
                axes.fill_between(x, lows, highs, alpha=0.2)
        row[0].legend()
    figure.savefig(path, dpi=120)
