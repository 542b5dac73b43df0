"""`shoal bench networks`: seconds a mini-batch, in frameworks that are shown to compute the same.

Each row has processes of its own, in the Python that has the framework. Parameters, loss and gradient norm on
the same weights and samples are compared with PyTorch's, and a row that differs is rejected. On the samples
of a dataset the losses of all steps are compared, too.

Several workers share a batch and the threads of a row. Batch normalisation sees a worker's samples alone, so
that a network with it is compared with PyTorch's row of as many workers, others with its row of the fewest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.bench import record
from shoal.bench.environments import check_names, how_to_get, python_of
from shoal.bench.samples import SEED, Arrays, draw, open_task, resolve
from shoal.bench.screen import make_table
from shoal.bench.sensors import Watch
from shoal.errors import InputError, counted
from shoal.models.init import initialise
from shoal.networks.description import Layer, Resolved, names, read
from shoal.networks.modules import Network
from shoal.runtime.cores import physical_cores
from shoal.runtime.files import write_json
from shoal.runtime.network import interface_towards

_ADAPTERS = Path(__file__).parent / "frameworks"
MODES = ("default", "tuned")
ON_GPU = ("pytorch", "jax")  # whose adapters compute on a GPU; others were not tried
# In place of the current folder, whose files might have the names of modules.
_RUN = "import sys; sys.path[0] = sys.argv[1]; import harness; sys.exit(harness.main(*sys.argv[2:]))"
_REFERENCE = "pytorch"
_AGREE = 1e-3  # relative, of loss and gradient norm
_CLOCKS, _SLACK_S = 0.05, 1e-3  # a part of the total, and seconds, that reading the losses may take
_SUM = 1e-6  # relative, of the total and its parts
_LAST_WORDS = 300  # of an error, in characters
_PROCESSES = ("pytorch", "paddle")  # a process for each worker; elsewhere one process has all of them
_POLL_S = 0.2


@dataclass(frozen=True)
class NetworksOptions:
    """What is measured; a row for each combination, or for each of `cells`."""

    networks: tuple[str, ...]
    frameworks: tuple[str, ...] = (_REFERENCE,)
    modes: tuple[str, ...] = MODES
    batch_sizes: tuple[int, ...] = (64,)
    threads: tuple[int, ...] = ()
    steps: int = 20
    warmup: int = 5
    limit_s: float = 600.0  # for a row
    pythons: Mapping[str, str] = field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"
    cells: tuple[Cell, ...] = ()  # those of a network and batch size together
    workers: tuple[int, ...] = (1,)
    data: Path | None = None  # a dataset; None: random samples

    def check(self) -> None:
        """Raise an InputError for what cannot be measured."""
        check_names((*self.frameworks, *self.pythons))
        for mode in self.modes:
            if mode not in MODES:
                raise InputError(f"unknown mode {mode!r}", hint=f"use {' or '.join(MODES)}")
        if min(self.steps, self.warmup, *self.batch_sizes, *self.threads, *self.workers, self.limit_s) <= 0:
            raise InputError("steps, warm-up, batch sizes, threads, workers and the limit must be above 0")
        for name in self.frameworks if self.device == "cuda" else ():
            if name not in ON_GPU:
                raise InputError(f"{name} was not tried on a GPU", hint=f"use {' or '.join(ON_GPU)}")
        for name in (name for name, path in self.pythons.items() if not path):
            raise InputError(f"--python {name} names no Python", hint=f"use --python {name}=PATH")
        for network in self.networks:
            resolve(network, self.data)


@dataclass(frozen=True)
class Cell:
    """A combination that is measured."""

    network: str
    framework: str
    mode: str
    batch: int
    threads: int  # of all workers together
    workers: int = 1

    @property
    def name(self) -> str:
        words = [counted(self.threads, "thread")]
        words += [counted(self.workers, "worker")] if self.workers > 1 else []
        return f"{self.network} {self.framework} {self.mode} batch {self.batch}, {', '.join(words)}"

    @property
    def impossible(self) -> str:
        """Say why there is no such row; empty where there is one."""
        for count, unit in ((self.batch, "sample"), (self.threads, "thread")):
            if count % self.workers:
                return f"{self.workers} workers cannot share {counted(count, unit)} evenly"
        return ""


@dataclass
class Row:
    """What came of a cell."""

    cell: Cell
    status: Literal["done", "rejected", "failed", "left out"]
    reason: str = ""
    parameters: int = 0
    loss: float = 0.0
    gradient_norm: float = 0.0
    samples: list[float] = field(default_factory=list)  # seconds of each step after the warm-up
    reads: list[float] = field(default_factory=list)  # seconds of reading each of their losses
    total_s: float = 0.0
    losses: list[float] = field(default_factory=list)  # of all steps, the warm-up included
    versions: dict[str, str] = field(default_factory=dict)
    layers: str = ""  # digest of the network
    multiply_adds: int = 0  # of one sample, forward
    mechanism: str = ""  # by which several workers agree
    ended: float = 0.0  # the steps, in seconds since the epoch
    peak_bytes: int = 0  # resident memory; 0 if the system does not tell it
    sensors: dict[str, Any] = field(default_factory=dict)  # a column each, by second

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples)


def as_json(layer: Layer) -> dict[str, Any]:
    """Return a layer as an adapter reads it."""
    inner = {name: [as_json(part) for part in getattr(layer, name)] for name in ("body", "shortcut")}
    return {
        "kind": layer.kind,
        "settings": dict(layer.settings),
        "before": layer.before,
        "after": layer.after,
        **inner,
    }


def write_inputs(resolved: Resolved, samples: Arrays, folder: Path) -> dict[str, str]:
    """Write initial weights, in PyTorch's layout, and samples; return their files."""
    with torch.device("meta"):
        network = Network(resolved)
    network.to_empty(device="cpu")
    initialise(network, SEED)
    files = {"weights": str(folder / "weights.npz"), "data": str(folder / "data.npz")}
    weights: dict[str, Any] = {name: w.detach().numpy() for name, w in network.named_parameters()}
    np.savez(files["weights"], **weights)
    np.savez(files["data"], inputs=samples[0], targets=samples[1])
    return files


def run_adapter(cell: Cell, job: dict[str, Any], options: NetworksOptions, folder: Path) -> Row:
    """Run a cell in processes of its own; return what it measured, or why there is nothing."""
    python = python_of(cell.framework, options.pythons)
    if python is None:
        return Row(cell, "failed", how_to_get(cell.framework))
    processes = cell.workers if cell.framework in _PROCESSES else 1
    job = {**job, "processes": processes, "ports": _free_ports(processes)}
    write_json(folder / "job.json", {**job, "program": python})
    if cell.framework == "caffe":  # has no Python: this one drives the program
        python = sys.executable
    command = [python, "-u", "-c", _RUN, str(_ADAPTERS), cell.framework, str(folder / "job.json")]
    names_of_threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # On the CPU no GPU: a framework that takes one by itself would be compared with others that do not.
    settings = ["CUDA_VISIBLE_DEVICES="] if options.device == "cpu" else []
    each = cell.threads // cell.workers
    # Temporary files of a framework go with the folder.
    settings += [f"GLOO_SOCKET_IFNAME={interface_towards('127.0.0.1')}", f"TMPDIR={folder}"]
    words = ["env", *settings, *(f"{name}={each}" for name in names_of_threads), *command]
    with Watch() as watch, contextlib.ExitStack() as stack:
        children, until = [], time.monotonic() + options.limit_s
        for rank in range(processes):
            screens = [stack.enter_context((folder / f"{to}-{rank}").open("w")) for to in ("out", "err")]
            child = subprocess.Popen([*words, str(rank)], stdout=screens[0], stderr=screens[1])
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
        while None in (codes := [child.poll() for child in children]) and not any(codes):
            if time.monotonic() > until:
                return Row(cell, "failed", f"no end within {options.limit_s:g} s")
            time.sleep(_POLL_S)
    rank = next((rank for rank, code in enumerate(codes) if code), 0)  # the first that failed
    out, err = ((folder / f"{to}-{rank}").read_text(errors="replace") for to in ("out", "err"))
    row = parse(cell, out, err, codes[rank] or 0)
    row.sensors = watch.told(row.ended - row.total_s, row.ended, cell.batch * len(row.samples))
    return row


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


def parse(cell: Cell, stdout: str, stderr: str, status: int) -> Row:
    """Return the row that an adapter's output tells."""
    events: dict[str, dict[str, Any]] = {}
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
            events[event.pop("event")] = event
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a library's own words
    if "left out" in events:
        return Row(cell, "left out", str(events["left out"].get("reason"))[:_LAST_WORDS])
    if "error" in events:
        return Row(cell, "failed", str(events["error"].get("error"))[:_LAST_WORDS])
    if status or "timed" not in events or "identity" not in events or "built" not in events:
        last = " ".join((stderr.strip() or "it printed nothing").rpartition("\n")[2].split())
        return Row(cell, "failed", f"status {status}: {last[-_LAST_WORDS:]}")
    built, identity, timed = (events[name] for name in ("built", "identity", "timed"))
    return Row(
        cell,
        "done",
        parameters=built["parameters"],
        loss=identity["loss"],
        gradient_norm=identity["gradient_norm"],
        samples=timed["samples"],
        reads=timed["reads"],
        total_s=timed["total_s"],
        losses=timed["losses"],
        ended=timed.get("ended", 0.0),
        peak_bytes=timed.get("peak_bytes", 0),
        versions={name: str(value) for name, value in built["versions"].items()},
        mechanism=built.get("mechanism", ""),
    )


def judged(
    row: Row, resolved: Resolved, reference: Row | None, steps: int, *, curve: Row | None = None
) -> Row:
    """Return the row, rejected where it computes something else or its clock does not add up.

    With `curve`, the losses of all steps must be those of that row.
    """
    if row.status == "done":
        problem = _problem(row, resolved, reference, steps) or (curve and _drift(row, curve)) or ""
        if problem:
            row.status, row.reason = "rejected", problem
    return row


def _drift(row: Row, reference: Row) -> str:
    """Say in which step the losses part; empty where they do not."""
    if len(row.losses) != len(reference.losses):
        return f"{len(row.losses)} losses, {_REFERENCE} has {len(reference.losses)}"
    for step, (ours, theirs) in enumerate(zip(row.losses, reference.losses, strict=True), 1):
        if not abs(ours - theirs) <= _AGREE * abs(theirs):
            return f"loss {ours:.6g} in step {step}, {_REFERENCE} has {theirs:.6g}"
    return ""


def _problem(row: Row, resolved: Resolved, reference: Row | None, steps: int) -> str:
    if row.parameters != resolved.num_parameters:
        return f"{row.parameters:,} parameters, and the description has {resolved.num_parameters:,}"
    for name in ("loss", "gradient_norm"):
        ours, theirs = getattr(row, name), getattr(reference or row, name)
        if not (math.isfinite(ours) and abs(ours - theirs) <= _AGREE * abs(theirs)):
            return f"{name} {ours:.6g} on the same weights and samples, {_REFERENCE} has {theirs:.6g}"
    if reference is None and row.cell.framework != _REFERENCE:
        return f"nothing to compare with: {_REFERENCE} has no row of this network and batch size"
    if not len(row.samples) == len(row.reads) == steps or min(row.samples) <= 0:
        shortest = min(row.samples, default=0.0)
        samples = f"{len(row.samples)} samples and {len(row.reads)} reads"
        return f"{samples} of {counted(steps, 'step')}, the shortest {shortest:g} s"
    parts = sum(row.samples) + sum(row.reads)
    if not abs(parts - row.total_s) <= _SUM * row.total_s:
        return f"steps and reads take {parts:.4g} s, and all together {row.total_s:.4g} s"
    reading = steps * statistics.median(row.reads)
    if not reading <= _CLOCKS * row.total_s + _SLACK_S:
        return (
            f"reading the losses takes {reading:.4g} s of {row.total_s:.4g} s: "
            "its steps end before they are computed"
        )
    return ""


def measure(options: NetworksOptions, rows: Sequence[Row], keep: Callable[[Row], None]) -> None:
    """Measure each cell that has no row yet; `keep` gets each new one."""
    known = {row.cell: row for row in rows if row.status == "done"}
    for (network, batch), cells in itertools.groupby(
        _cells(options), lambda cell: (cell.network, cell.batch)
    ):
        resolved = resolve(network, options.data)
        by_cut = "kind='batch_norm'" in repr(resolved.layers)  # statistics are those of a worker's part
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            samples = draw(network, options.data, batch, options.warmup + options.steps)
            files = write_inputs(resolved, samples, Path(folder))
            references: dict[int, Row] = {}
            # PyTorch first, which the others are compared with.
            for cell in sorted(cells, key=lambda cell: cell.framework != _REFERENCE):
                if cell not in known or known[cell].layers != resolved.digest:
                    if cell.impossible:
                        keep(Row(cell, "left out", cell.impossible))
                        continue
                    job = {**files, **_job(resolved, cell, options)}
                    found = run_adapter(cell, job, options, Path(folder))
                    found.layers, found.multiply_adds = resolved.digest, resolved.multiply_adds
                    reference = references.get(cell.workers if by_cut else min(references, default=0))
                    curve = reference if options.data else None
                    known[cell] = judged(found, resolved, reference, options.steps, curve=curve)
                    keep(known[cell])
                if (cell.framework, known[cell].status) == (_REFERENCE, "done"):
                    references.setdefault(cell.workers, known[cell])


def _cells(options: NetworksOptions) -> Iterable[Cell]:
    """Yield the cells, those of a network and batch size together."""
    if options.cells:
        return options.cells
    threads = options.threads or (physical_cores(),)
    axes = (options.networks, options.batch_sizes, options.frameworks, options.modes, threads)
    return (
        Cell(network, framework, mode, batch, count, workers)
        for network, batch, framework, mode, count in itertools.product(*axes)
        for workers in options.workers
    )


def _job(resolved: Resolved, cell: Cell, options: NetworksOptions) -> dict[str, Any]:
    return {
        "network": {"is_tokens": resolved.is_tokens, "layers": [as_json(layer) for layer in resolved.layers]},
        "batch": cell.batch,
        "workers": cell.workers,
        "threads": cell.threads,
        "mode": cell.mode,
        "device": options.device,
        "warmup": options.warmup,
        "steps": options.steps,
        "lr": 0.01,
        "momentum": 0.9,
    }


def command(options: NetworksOptions, output: Path | None, *, listing: bool) -> int:
    """Measure, showing each row as it comes, and keep the record; return 1 if a row failed."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    if listing:
        console.print(_list())
        return 0
    options.check()
    record.begin()
    asked: dict[str, Any] = {"steps": options.steps, "warmup": options.warmup, "device": options.device}
    if options.data:
        first = open_task(options.networks[0], options.data).data.datasets[0]
        asked["data"] = {"path": str(options.data), "fingerprint": first.fingerprint}
    rows = record.held(output, "networks", asked, Row)
    if rows:
        console.print(f"{counted(len(rows), 'row')} from {output}")

    def keep(row: Row) -> None:
        rows[:] = [other for other in rows if other.cell != row.cell] + [row]
        how = f" ({row.mechanism})" if row.mechanism else ""
        told = f"{row.median_s * 1e3:,.1f} ms{how}" if row.status == "done" else f"{row.status}: {row.reason}"
        console.print(escape(f"{row.cell.name}: {told}"), highlight=False, soft_wrap=True)
        if output is not None:
            write_json(
                output, {**record.describe("networks"), "options": asked, "rows": [asdict(r) for r in rows]}
            )

    measure(options, rows, keep)
    console.print(_table(rows))
    return int(any(row.status in ("rejected", "failed") for row in rows))


def _list() -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("network", "parameters", "multiply-adds", "input", "classes", "network and source"):
        table.add_column(heading, justify="left" if "network" in heading else "right")
    for name in names():
        described = read(name)
        one = described.resolve()
        shape = "x".join(map(str, one.input)) + (" tokens" if one.is_tokens else "")
        told = f"{escape(one.title)}\n[dim]{escape(described.source)}[/dim]".rstrip()
        sizes = (f"{number:,}" for number in (one.num_parameters, one.multiply_adds))
        table.add_row(name, *sizes, shape, f"{one.classes:,}", told)
    return table


def _table(rows: Sequence[Row]) -> Table:
    counts = ("batch", "threads", "workers")
    table = make_table(
        ["network", "framework", "mode"],
        [*counts, "median", "p5", "p95", "samples/s"],
        ["ms a mini-batch"],
    )
    for row in rows:
        cell = row.cell
        shown = (cell.network, cell.framework, cell.mode, *map(str, (cell.batch, cell.threads, cell.workers)))
        if row.status != "done":
            table.add_row(*shown, row.status)
            continue
        low, high = np.quantile(row.samples, (0.05, 0.95))
        times = (f"{1e3 * seconds:,.2f}" for seconds in (row.median_s, low, high))
        table.add_row(*shown, *times, f"{cell.batch / row.median_s:,.1f}")
    return table
