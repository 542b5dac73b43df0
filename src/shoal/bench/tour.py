"""`shoal bench all`: networks, collectives and strategies on this machine within some minutes, and a report.

Each stage is a command of its own that keeps its record row by row. One that meets its deadline is stopped,
and what it has not measured is left for the next run of the same command.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.bench import report
from shoal.bench.environments import FRAMEWORKS, python_of
from shoal.bench.networks import MODES, Cell
from shoal.bench.read_records import load
from shoal.errors import InputError, counted
from shoal.page.render import check_packages
from shoal.runtime.cores import physical_cores
from shoal.runtime.files import alone_in, write_text

_NETWORKS = ("fcn-r", "alexnet-r", "lstm", "resnet-56")  # the shortest steps first
_BATCHES = (32, 128)
_STRATEGIES = ("allreduce", "onebit", "diloco")
_LEAST_S, _REPORT_S = 20.0, 15.0  # in less a stage measures nothing; for the page at the end
_POLL_S, _PATIENCE_S = 0.2, 10.0
_MOST_NAMED = 24  # rows that are left out
_LAST_WORDS = 300  # of an error, in characters
Run = Callable[["Stage", float], str]  # (stage, seconds) -> why it failed, if it did; it ends in that time


@dataclass(frozen=True)
class Stage:
    """Command of `shoal bench` and its part of the time, beside that of later stages."""

    name: str
    words: tuple[str, ...]
    record: Path
    rows: tuple[str, ...]  # beginnings of their names
    share: float

    def missing(self) -> list[str]:
        """Return the rows that are not in the record."""
        if not self.record.exists():
            return list(self.rows)
        record = load(self.record)
        names = [row.name for row in record.timed] or [record.kind]
        return [row for row in self.rows if not any(name.startswith(row) for name in names)]


def stages(folder: Path) -> list[Stage]:
    """Return what is measured: frameworks first, in one setting, then other settings of the same records."""
    frameworks = [name for name in FRAMEWORKS if python_of(name, {})]
    cores = physical_cores()
    threads = sorted({1 << power for power in range(cores.bit_length())} | {cores})
    words: tuple[str, ...]
    found = []
    for title, batches, counts in (("", _BATCHES[:1], [cores]), (", all settings", _BATCHES, threads)):
        for network in _NETWORKS:
            words = ("networks", network, "--steps", "10", "--warmup", "3", "--frameworks", *frameworks)
            words += ("--batch-sizes", *map(str, batches), "--threads", *map(str, counts))
            cells = itertools.product(frameworks, MODES, batches, counts)
            rows = tuple(Cell(network, *cell).name for cell in cells)
            found.append(Stage(f"networks {network}{title}", words, folder / "networks.json", rows, 1.0))
        if not title:
            words = ("gradsync", "--networks", "fcn-r", "--workers", "1", "2", "--runs", str(folder / "runs"))
            words += ("--strategies", *_STRATEGIES)
            rows = ("allreduce x1", *(f"{name} x2" for name in _STRATEGIES))
            found.append(Stage("gradsync", words, folder / "gradsync.json", rows, 1.0))
            words = ("collectives", "--nproc", "2", "--sizes", "64KB", "16MB")
            found.append(Stage("collectives", words, folder / "collectives.json", ("collectives",), 0.5))
    return found


def measure(
    planned: Sequence[Stage], seconds: float, run: Run, clock: Callable[[], float]
) -> tuple[list[str], bool]:
    """Run the stages, each in its share of the time left; return notes, and whether a stage failed."""
    end, failed = clock() + seconds, {}
    todo = [stage for stage in planned if stage.missing()]
    for number, stage in enumerate(todo):
        limit = (end - clock()) * stage.share / sum(later.share for later in todo[number:])
        if limit >= _LEAST_S and (problem := run(stage, limit)):
            failed[stage.name] = problem
    notes = [f"{name} failed: {problem}" for name, problem in failed.items()]
    left = list(dict.fromkeys(r for stage in todo if stage.name not in failed for r in stage.missing()))
    if left:
        more = f"; {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
        named = f"{'; '.join(left[:_MOST_NAMED])}{more}"
        notes.append(f"{counted(len(left), 'row')} left out for lack of time: {named}.")
    return notes, bool(failed)


def command(folder: Path, minutes: float) -> int:
    """Measure, write the report, and print the answer last; return 1 if a stage failed."""
    if not _LEAST_S + _REPORT_S <= 60 * minutes <= 1e6:
        raise InputError(
            f"--minutes {minutes:g} is too short or too long", hint="use 1 or more, such as --minutes 10"
        )
    check_packages()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
    )
    with alone_in(folder):
        planned = stages(folder)
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar, began = progress.add_task("starting", total=60 * minutes), time.monotonic()

            def run(stage: Stage, limit_s: float) -> str:
                progress.update(bar, description=stage.name)
                return run_stage(
                    stage, limit_s, lambda: progress.update(bar, completed=time.monotonic() - began)
                )

            notes, failed = measure(planned, 60 * minutes - _REPORT_S, run, time.monotonic)
            progress.update(bar, description="report")
            records = [
                load(path) for path in dict.fromkeys(stage.record for stage in planned) if path.exists()
            ]
            write_text(folder / "report.html", report.page(records, notes))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for note in notes:
        console.print(note)
    console.print(f"wrote {folder / 'report.html'}")
    console.print(report.best_here(records) or "No network was measured: use more --minutes.")
    return int(failed)


def run_stage(stage: Stage, limit_s: float, watch: Callable[[], None]) -> str:
    """Run a stage until it ends or its time is over; return the error with which it failed, or nothing."""
    log = stage.record.with_name(f"{stage.name.replace(' ', '-')}.log")
    with log.open("w") as screen:
        command = [sys.executable, "-m", "shoal", "bench", *stage.words, "--json", str(stage.record)]
        process = subprocess.Popen(command, stdout=screen, stderr=subprocess.STDOUT, start_new_session=True)
        until = time.monotonic() + limit_s
        try:
            while process.poll() is None and time.monotonic() < until:
                watch()
                time.sleep(_POLL_S)
            status = process.poll()
        finally:
            _end(process)
    if not status:
        return ""
    text = log.read_text(errors="replace").strip()
    last = text.rpartition("error: ")[2] if "error: " in text else text.rpartition("\n")[2]
    return f"status {status}, {' '.join(last.split())[:_LAST_WORDS]} ({log})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a command, which ends what it has started; kill what is left."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
