"""`shoal bench layouts`: one configuration under several layouts, each in a `shoal train` of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.bench import record
from shoal.bench.cells import Status, train
from shoal.bench.gradsync import NETWORKS, make_data
from shoal.config.layout import Layout, parse_layout, under
from shoal.config.load import to_toml
from shoal.config.sections import Config
from shoal.errors import InputError
from shoal.runtime.files import check_targets, digest_of, write_json, write_text
from shoal.tasks.choose import open_task
from shoal.train.clock import PHASES
from shoal.train.metrics import read_metrics

_INSIDE = ("tp", "shard")  # phases that lie within forward and backward
_LEAST_MS = 0.05  # a phase that is shorter under all layouts is not shown


@dataclass(frozen=True)
class LayoutsOptions:
    """What is measured; `config` has the number of steps."""

    config: Config
    name: str  # of the preset or file
    layouts: tuple[Layout, ...]
    warmup: int  # first steps, whose times do not count
    runs: Path | None = None  # None: a temporary folder

    def check(self) -> None:
        """Raise an InputError for what cannot be measured."""
        steps = self.config.train.steps
        if self.warmup < 0 or steps - self.warmup < 4:
            raise InputError(
                f"--steps {steps} --warmup {self.warmup}: at least 4 steps must remain after the warm-up"
            )
        if not self.layouts:
            raise InputError("--layouts names no layout", hint='for example --layouts "1, dp2, tp2, zero3x2"')


@dataclass
class Column:
    """Result of a layout; times are those of rank 0, after the warm-up."""

    layout: str
    status: Status
    reason: str = ""
    parameters: int = 0  # on the rank that holds most
    peak_bytes: int = 0  # of the rank that needs most
    peak_bytes_of_all: int = 0
    seconds: list[float] = field(default_factory=list)
    phases_s: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # of all steps
    found: dict[str, float] = field(default_factory=dict)  # on the splits validation and test

    def ms(self) -> dict[str, float]:
        """Return the ms of a step, its phases, and the rest: means over the middle half of the steps."""
        quarter = len(self.seconds) // 4
        order = sorted(range(len(self.seconds)), key=self.seconds.__getitem__)
        middle = order[quarter : len(order) - quarter]
        series = {"step": self.seconds, **self.phases_s}
        means = {name: 1e3 * statistics.fmean(values[n] for n in middle) for name, values in series.items()}
        outer = sum(means[name] for name in PHASES if name not in _INSIDE)
        return means | {"other": means["step"] - outer}


def read_run(layout: str, lines: Sequence[dict[str, Any]], warmup: int) -> Column:
    """Return the column of a run, given the lines of its metrics.jsonl."""
    steps = [line for line in lines if "seconds" in line]
    logged = [line for line in steps if "most_parameters" in line]
    found: dict[str, float] = {}
    for line in lines:
        found |= {name: value for name, value in line.items() if name.startswith(("validation_", "test_"))}
    return Column(
        layout,
        "done",
        parameters=int(logged[-1]["most_parameters"]),
        peak_bytes=int(max(line["most_peak_bytes"] for line in logged)),
        peak_bytes_of_all=int(max(line["peak_bytes"] for line in logged)),
        seconds=[line["seconds"] for line in steps[warmup:]],
        phases_s={name: [line[f"{name}_s"] for line in steps[warmup:]] for name in PHASES},
        losses=[line["loss"] for line in steps],
        found=found,
    )


def measure(
    options: LayoutsOptions,
    folder: Path,
    digest: str,
    known: Sequence[Column],
    keep: Callable[[Column], None],
) -> None:
    """Train under each layout that has no column yet; `keep` gets each new one."""
    done = {column.layout for column in known if column.status == "done"}
    with Console(stderr=True).status("starting") as status:
        for layout in options.layouts:
            if (name := str(layout)) in done:
                continue
            file = folder / f"{name}-{digest[:12]}.toml"  # other settings: another run
            write_text(file, to_toml(under(options.config, layout)))

            def watch(step: int, name: str = name) -> None:
                status.update(f"{name}: step {step} of {options.config.train.steps}")

            words, run_dir = [str(file), "--max-restarts", "0"], folder / f"run-{name}"
            result, reason = train(words, layout.world_size, run_dir, None, watch)
            column = Column(name, result, reason)
            if result == "done":
                column = read_run(name, read_metrics(run_dir / "metrics.jsonl"), options.warmup)
            keep(column)


def command(options: LayoutsOptions, output: Path | None, plot: Path | None) -> int:
    """Measure and report, also after an interruption; return 1 if a run failed, or none is done."""
    options.check()
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib", hint="pip install 'shoal[report]'")
    check_targets(output, plot)
    record.begin()
    columns: list[Column] = []
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True)
        folder = (options.runs or Path(stack.enter_context(temporary))).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        options, asked = _with_data(options, folder)
        columns += record.held(output, "layouts", asked, Column)
        stack.callback(_say, columns, asked, plot)

        def keep(column: Column) -> None:
            columns[:] = [other for other in columns if other.layout != column.layout] + [column]
            if output is not None:
                rows = [asdict(each) for each in columns]
                write_json(output, {**record.describe("layouts"), "options": asked, "rows": rows})

        measure(options, folder, asked["settings"], columns, keep)
    failed = any(column.status == "failed" for column in columns)
    return int(failed or not any(column.status == "done" for column in columns))


def _with_data(options: LayoutsOptions, folder: Path) -> tuple[LayoutsOptions, dict[str, Any]]:
    """Return the options with a dataset, a small one if none is given, and what the record says of them."""
    config = options.config
    if not config.data.datasets:
        made = make_data(folder / "data", NETWORKS.get(options.name, NETWORKS["gpt"]).made_of)
        data = config.data.model_copy(update={"datasets": (str(made),)})
        config = config.model_copy(update={"data": data})
    task = open_task(config)
    read = {"config": to_toml(config), "data": [dataset.fingerprint for dataset in task.data.datasets]}
    return replace(options, config=config), {
        "config": options.name,
        "settings": digest_of(read),
        "steps": config.train.steps,
        "warmup": options.warmup,
        "unit": task.data.unit,
        "per_step": task.targets_per_step,
    }


def _say(columns: Sequence[Column], asked: dict[str, Any], plot: Path | None) -> None:
    if columns:
        Console(width=None if sys.stdout.isatty() else 110).print(table(columns, asked))
    if plot is not None and any(column.status == "done" for column in columns):
        draw(columns, asked, plot)


def table(columns: Sequence[Column], asked: dict[str, Any]) -> Table:
    """Return a column for each layout; phases that take no time under any of them are left out."""
    done = {column.layout: column.ms() for column in columns if column.status == "done"}
    base = next(iter(done), "")
    rows: dict[str, Callable[[Column], str]] = {
        "ranks": lambda column: f"{parse_layout(column.layout).world_size}",
        "parameters a rank": lambda column: f"{column.parameters:,}",
        "ms a step": lambda column: f"{done[column.layout]['step']:,.1f}",
    }
    for name in (*PHASES, "other"):
        if any(ms[name] >= _LEAST_MS for ms in done.values()):
            label = f"  of which {name}" if name in _INSIDE else f"  {name}"
            rows[label] = lambda column, name=name: f"{done[column.layout][name]:,.1f}"  # type: ignore[misc]
    rows |= {
        f"{asked['unit']}/s": lambda column: f"{1e3 * asked['per_step'] / done[column.layout]['step']:,.0f}",
        f"speed ({base} = 1)": lambda column: f"{done[base]['step'] / done[column.layout]['step']:.2f}",
        "peak memory a rank, MB": lambda column: f"{column.peak_bytes / 1e6:,.0f}",
        "peak memory in all, MB": lambda column: f"{column.peak_bytes_of_all / 1e6:,.0f}",
        f"loss, step {asked['steps']}": lambda column: f"{column.losses[-1]:.4f}",
    }
    for name in dict.fromkeys(name for column in columns for name in column.found):
        rows[name.replace("_", " ")] = lambda column, name=name: f"{column.found[name]:.5g}"  # type: ignore[misc]
    notes = [f"{each.layout}: {each.status}: {each.reason}" for each in columns if each.status != "done"]
    shown = Table(
        title=f"{asked['config']}: {asked['steps']} steps, the first {asked['warmup']} not timed",
        caption=escape("\n".join(notes)) or None,
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("layout")
    for column in columns:
        shown.add_column(
            column.layout if column.status == "done" else f"{column.layout}\n{column.status}", justify="right"
        )
    for label, read in rows.items():
        shown.add_row(label, *(read(column) if column.status == "done" else "" for column in columns))
    return shown


def draw(columns: Sequence[Column], asked: dict[str, Any], path: Path) -> None:
    """Plot the phases of a step as stacked bars, and the peak memory beside them."""
    from matplotlib.figure import Figure

    done = [column for column in columns if column.status == "done"]
    names = [column.layout for column in done]
    parts = [_parts(column.ms()) for column in done]
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(done)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    left = [0.0] * len(done)
    for name in parts[0]:
        widths = [part[name] for part in parts]
        if max(widths) >= _LEAST_MS:
            times.barh(names, widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    times.set(xlabel="ms a step", title=f"{asked['config']}: a step by phase")
    times.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(parts[0]))
    memory.barh(names, [column.peak_bytes / 1e6 for column in done], color="tab:grey")
    memory.set(xlabel="peak memory of a rank, MB", title="the rank with most")
    for axes in (times, memory):
        axes.set_axisbelow(True)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def _parts(ms: dict[str, float]) -> dict[str, float]:
    """Cut a step into parts that add up to it."""
    inside = sum(ms[name] for name in _INSIDE)
    parts = {"forward and backward": ms["forward"] + ms["backward"] - inside}
    return parts | {name: ms[name] for name in (*PHASES, "other") if name not in ("forward", "backward")}
