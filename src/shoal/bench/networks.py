"""`shoal bench networks`: seconds a mini-batch, in frameworks that are shown to compute the same.

Each row is a process of its own, in the Python that has the framework. Parameters, loss and gradient norm on
the same weights and samples are compared with PyTorch's, and a row that differs is rejected.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.bench import record
from shoal.bench.environments import check_names, how_to_get, python_of
from shoal.bench.sensors import Watch
from shoal.errors import InputError, counted
from shoal.models.init import initialise
from shoal.networks.description import Layer, Resolved, names, read
from shoal.networks.modules import Network
from shoal.runtime.device import physical_cores
from shoal.runtime.files import write_json

_ADAPTERS = Path(__file__).parent / "frameworks"
MODES = ("default", "tuned")
ON_GPU = ("pytorch", "jax")  # whose adapters compute on a GPU; others were not tried
# In place of the current folder, whose files might have the names of modules.
_RUN = "import sys; sys.path[0] = sys.argv[1]; import harness; sys.exit(harness.main(*sys.argv[2:]))"
_REFERENCE = "pytorch"
_AGREE = 1e-3  # relative, of loss and gradient norm
_CLOCKS, _SLACK_S = 0.05, 1e-3  # a part, and seconds, by which samples may fall short of the total
_BATCHES = 4  # different ones that take turns
_SEED = 1234
_LAST_WORDS = 300  # of an error, in characters


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

    def check(self) -> None:
        """Raise an InputError for what cannot be measured."""
        check_names((*self.frameworks, *self.pythons))
        for mode in self.modes:
            if mode not in MODES:
                raise InputError(f"unknown mode {mode!r}", hint=f"use {' or '.join(MODES)}")
        if min(self.steps, self.warmup, *self.batch_sizes, *self.threads) < 1 or self.limit_s <= 0:
            raise InputError("steps, warm-up, batch sizes, threads and the limit must be above 0")
        for name in self.frameworks if self.device == "cuda" else ():
            if name not in ON_GPU:
                raise InputError(f"{name} was not tried on a GPU", hint=f"use {' or '.join(ON_GPU)}")
        for name in (name for name, path in self.pythons.items() if not path):
            raise InputError(f"--python {name} names no Python", hint=f"use --python {name}=PATH")


@dataclass(frozen=True)
class Cell:
    """A combination that is measured."""

    network: str
    framework: str
    mode: str
    batch: int
    threads: int

    @property
    def name(self) -> str:
        threads = counted(self.threads, "thread")
        return f"{self.network} {self.framework} {self.mode} batch {self.batch}, {threads}"


@dataclass
class Row:
    """What came of a cell."""

    cell: Cell
    status: Literal["done", "rejected", "failed"]
    reason: str = ""
    parameters: int = 0
    loss: float = 0.0
    gradient_norm: float = 0.0
    samples: list[float] = field(default_factory=list)  # seconds of each step after the warm-up
    total_s: float = 0.0
    losses: list[float] = field(default_factory=list)  # of all steps, the warm-up included
    versions: dict[str, str] = field(default_factory=dict)
    layers: str = ""  # digest of the network
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


def write_inputs(resolved: Resolved, batch: int, folder: Path) -> dict[str, str]:
    """Write initial weights, in PyTorch's layout, and random samples; return their files."""
    with torch.device("meta"):
        network = Network(resolved)
    network.to_empty(device="cpu")
    initialise(network, _SEED)
    rng, count = np.random.default_rng(_SEED), batch * _BATCHES
    if resolved.is_tokens:
        tokens = rng.integers(0, resolved.classes, (count, resolved.input[0] + 1), dtype=np.int32)
        inputs: NDArray[Any] = tokens[:, :-1]
        targets = tokens[:, 1:].astype(np.int64)
    else:
        inputs = rng.standard_normal((count, *resolved.input), dtype=np.float32)
        targets = rng.integers(0, resolved.classes, count)
    files = {"weights": str(folder / "weights.npz"), "data": str(folder / "data.npz")}
    weights: dict[str, Any] = {name: w.detach().numpy() for name, w in network.named_parameters()}
    np.savez(files["weights"], **weights)
    np.savez(files["data"], inputs=inputs, targets=targets)
    return files


def run_adapter(cell: Cell, job: dict[str, Any], options: NetworksOptions, folder: Path) -> Row:
    """Run a cell in a process of its own; return what it measured, or why there is nothing."""
    python = python_of(cell.framework, options.pythons)
    if python is None:
        return Row(cell, "failed", how_to_get(cell.framework))
    write_json(folder / "job.json", {**job, "program": python})
    if cell.framework == "caffe":  # has no Python: this one drives the program
        python = sys.executable
    command = [python, "-u", "-c", _RUN, str(_ADAPTERS), cell.framework, str(folder / "job.json")]
    names_of_threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # On the CPU no GPU: a framework that takes one by itself would be compared with others that do not.
    hidden = ["CUDA_VISIBLE_DEVICES="] if options.device == "cpu" else []
    words = ["env", *hidden, *(f"{name}={cell.threads}" for name in names_of_threads), *command]
    try:
        with Watch() as watch:
            done = subprocess.run(
                words, capture_output=True, text=True, errors="replace", timeout=options.limit_s, check=False
            )
    except subprocess.TimeoutExpired:
        return Row(cell, "failed", f"no end within {options.limit_s:g} s")
    row = parse(cell, done.stdout, done.stderr, done.returncode)
    row.sensors = watch.told(row.ended - row.total_s, row.ended, cell.batch * len(row.samples))
    return row


def parse(cell: Cell, stdout: str, stderr: str, status: int) -> Row:
    """Return the row that an adapter's output tells."""
    events: dict[str, dict[str, Any]] = {}
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
            events[event.pop("event")] = event
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a library's own words
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
        total_s=timed["total_s"],
        losses=timed["losses"],
        ended=timed.get("ended", 0.0),
        peak_bytes=timed.get("peak_bytes", 0),
        versions={name: str(value) for name, value in built["versions"].items()},
    )


def judged(row: Row, resolved: Resolved, reference: Row | None, steps: int) -> Row:
    """Return the row, rejected where it computes something else or its clock does not add up."""
    if row.status == "done" and (problem := _problem(row, resolved, reference, steps)):
        row.status, row.reason = "rejected", problem
    return row


def _problem(row: Row, resolved: Resolved, reference: Row | None, steps: int) -> str:
    if row.parameters != resolved.num_parameters:
        return f"{row.parameters:,} parameters, and the description has {resolved.num_parameters:,}"
    for name in ("loss", "gradient_norm"):
        ours, theirs = getattr(row, name), getattr(reference or row, name)
        if not (math.isfinite(ours) and abs(ours - theirs) <= _AGREE * abs(theirs)):
            return f"{name} {ours:.6g} on the same weights and samples, {_REFERENCE} has {theirs:.6g}"
    if reference is None and row.cell.framework != _REFERENCE:
        return f"nothing to compare with: {_REFERENCE} has no row of this network and batch size"
    if len(row.samples) != steps or min(row.samples) <= 0:
        shortest = min(row.samples, default=0.0)
        return f"{len(row.samples)} samples of {counted(steps, 'step')}, the shortest {shortest:g} s"
    if not (1 - _CLOCKS) * row.total_s - _SLACK_S <= sum(row.samples) <= row.total_s:
        return (
            f"the steps take {sum(row.samples):.4g} s together, and {row.total_s:.4g} s to the last loss: "
            "its steps end before they are computed"
        )
    return ""


def measure(options: NetworksOptions, rows: Sequence[Row], keep: Callable[[Row], None]) -> None:
    """Measure each cell that has no row yet; `keep` gets each new one."""
    known = {row.cell: row for row in rows if row.status == "done"}
    for (network, batch), cells in itertools.groupby(
        _cells(options), lambda cell: (cell.network, cell.batch)
    ):
        resolved = read(network).resolve()
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            files = write_inputs(resolved, batch, Path(folder))
            reference: Row | None = None
            # PyTorch first, which the others are compared with.
            for cell in sorted(cells, key=lambda cell: cell.framework != _REFERENCE):
                if cell not in known or known[cell].layers != resolved.digest:
                    job = {**files, **_job(resolved, cell, options)}
                    found = run_adapter(cell, job, options, Path(folder))
                    found.layers = resolved.digest
                    known[cell] = judged(found, resolved, reference, options.steps)
                    keep(known[cell])
                if (cell.framework, known[cell].status) == (_REFERENCE, "done"):
                    reference = reference or known[cell]


def _cells(options: NetworksOptions) -> Iterable[Cell]:
    """Yield the cells, those of a network and batch size together."""
    if options.cells:
        return options.cells
    threads = options.threads or (physical_cores(),)
    axes = (options.networks, options.batch_sizes, options.frameworks, options.modes)
    return (
        Cell(network, framework, mode, batch, count)
        for network, batch, framework, mode in itertools.product(*axes)
        for count in threads
    )


def _job(resolved: Resolved, cell: Cell, options: NetworksOptions) -> dict[str, Any]:
    return {
        "network": {"is_tokens": resolved.is_tokens, "layers": [as_json(layer) for layer in resolved.layers]},
        "batch": cell.batch,
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
    asked = json.loads(
        json.dumps({k: v for k, v in asdict(options).items() if k in ("steps", "warmup", "device")})
    )
    rows = record.held(output, "networks", asked, Row)
    if rows:
        console.print(f"{counted(len(rows), 'row')} from {output}")

    def keep(row: Row) -> None:
        rows[:] = [other for other in rows if other.cell != row.cell] + [row]
        told = f"{row.median_s * 1e3:,.1f} ms" if row.status == "done" else f"{row.status}: {row.reason}"
        console.print(escape(f"{row.cell.name}: {told}"), highlight=False, soft_wrap=True)
        if output is not None:
            write_json(
                output, {**record.describe("networks"), "options": asked, "rows": [asdict(r) for r in rows]}
            )

    measure(options, rows, keep)
    console.print(_table(rows))
    return int(any(row.status != "done" for row in rows))


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
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), caption="ms a mini-batch", caption_justify="left")
    for heading in ("network", "framework", "mode", "batch", "threads", "median", "p5", "p95", "samples/s"):
        table.add_column(heading, justify="left" if heading in ("network", "framework", "mode") else "right")
    for row in rows:
        cell = row.cell
        shown = (cell.network, cell.framework, cell.mode, f"{cell.batch}", f"{cell.threads}")
        if row.status != "done":
            table.add_row(*shown, row.status)
            continue
        low, high = np.quantile(row.samples, (0.05, 0.95))
        times = (f"{1e3 * seconds:,.2f}" for seconds in (row.median_s, low, high))
        table.add_row(*shown, *times, f"{cell.batch / row.median_s:,.1f}")
    return table
