"""`shoal bench layouts`: one configuration under several layouts, each in a `shoal train` of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status as Line
from rich.table import Table

from shoal.bench import record
from shoal.bench.cells import Status, train
from shoal.bench.gradsync import NETWORKS, make_data
from shoal.bench.screen import make_table, show
from shoal.config.layout import Layout, parse_layout, under
from shoal.config.load import to_toml
from shoal.config.sections import Config
from shoal.errors import ConfigError, InputError
from shoal.launch import forking
from shoal.runtime.files import check_targets, digest_of, write_json, write_text
from shoal.tasks.choose import open_task
from shoal.train.clock import PHASES
from shoal.train.metrics import read_metrics

_BOTH = ("forward", "backward")
_INSIDE = ("tp", "shard")  # phases that lie within these two
_LEAST_STEPS = 4  # timed
# What a step consists of; waiting within forward and backward is apart.
SHOWN_PHASES = ("forward and backward", *(one for one in PHASES if one not in _BOTH), "other")


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

    def __post_init__(self) -> None:
        """Raise a ValueError for a result without its times, such as a record may hold."""
        if self.status != "done":
            return
        try:
            parse_layout(self.layout)
        except ConfigError as error:
            raise ValueError(error.message) from error
        lengths = {len(values) for values in (self.seconds, *self.phases_s.values())}
        if not (self.seconds and min(self.seconds) > 0 and self.losses):
            raise ValueError("a layout that is done needs seconds above 0, and losses")
        if self.phases_s.keys() != {*PHASES} or len(lengths) > 1:
            raise ValueError("a layout that is done needs as many times of each phase as seconds")

    @property
    def name(self) -> str:
        return self.layout

    def ms(self) -> dict[str, float]:
        """Return the ms of a step, its phases, and the rest: means over the middle half of the steps."""
        count = len(self.seconds)
        middle = sorted(range(count), key=self.seconds.__getitem__)[count // 4 : count - count // 4]
        series = {"step": self.seconds, **self.phases_s}
        means = {name: 1e3 * statistics.fmean(values[n] for n in middle) for name, values in series.items()}
        return means | {"other": means["step"] - sum(means[name] for name in PHASES if name not in _INSIDE)}

    def parts(self) -> dict[str, float]:
        """Return the ms of a step, and of parts that add up to it."""
        ms = self.ms()
        both = sum(ms[name] for name in _BOTH) - sum(ms[name] for name in _INSIDE)
        return ms | {SHOWN_PHASES[0]: both}

    def texts(self, base: Column, asked: dict[str, Any]) -> dict[str, str]:
        """Return a text for each row of a table; `asked` are the options of the record."""
        ms, base_ms = self.ms(), base.ms()["step"]
        phases = {
            f"  of which {name}" if name in _INSIDE else f"  {name}": ms[name] for name in (*PHASES, "other")
        }
        return {
            "ranks": f"{parse_layout(self.layout).world_size}",
            "parameters a rank": f"{self.parameters:,}",
            "ms a step": f"{ms['step']:,.1f}",
            **{label: f"{round(value, 1) + 0.0:,.1f}" for label, value in phases.items()},
            f"{asked['unit']}/s": f"{1e3 * asked['per_step'] / ms['step']:,.0f}",
            f"speed ({base.layout} = 1)": f"{base_ms / ms['step']:.2f}",
            "peak memory a rank, MB": f"{self.peak_bytes / 1e6:,.0f}",
            "peak memory in all, MB": f"{self.peak_bytes_of_all / 1e6:,.0f}",
            f"loss, step {asked['steps']}": f"{self.losses[-1]:.4f}",
            **{name.replace("_", " "): f"{value:.5g}" for name, value in self.found.items()},
        }


def read_run(layout: str, lines: Sequence[dict[str, Any]], warmup: int) -> Column:
    """Return the column of a run, given the lines of its metrics.jsonl."""
    steps = [line for line in lines if "seconds" in line]
    logged = [line for line in steps if "most_parameters" in line]
    splits = ("validation_", "test_")
    return Column(
        layout,
        "done",
        parameters=int(logged[-1]["most_parameters"]),
        peak_bytes=int(max(line["most_peak_bytes"] for line in logged)),
        peak_bytes_of_all=int(max(line["peak_bytes"] for line in logged)),
        seconds=[line["seconds"] for line in steps[warmup:]],
        phases_s={name: [line[f"{name}_s"] for line in steps[warmup:]] for name in PHASES},
        losses=[line["loss"] for line in steps],
        found={name: value for line in lines for name, value in line.items() if name.startswith(splits)},
    )


def command(
    config: Config,
    name: str,
    layouts: Sequence[Layout],
    warmup: int,
    runs: Path | None,
    output: Path | None,
    plot: Path | None,
) -> int:
    """Train under each layout and report, also after a stop; return 1 if a run failed or none is done.

    `name` is that of the preset or file. Layouts with a column in the record `output` are not trained again.
    """
    steps = config.train.steps
    if not 0 <= warmup <= steps - _LEAST_STEPS:
        raise InputError(f"--steps {steps} --warmup {warmup}: at least {_LEAST_STEPS} steps must be timed")
    if not layouts:
        raise InputError("--layouts names no layout", hint='for example --layouts "1, dp2, tp2, zero3x2"')
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib", hint="pip install 'shoal[report]'")
    check_targets(output, plot)
    record.begin()
    forking.load()
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True)
        folder = (runs or Path(stack.enter_context(temporary))).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        config = _with_data(config, name, folder)
        asked = {"config": name, "warmup": warmup, **_facts(config)}
        columns = {column.layout: column for column in record.held(output, "layouts", asked, Column)}
        stack.callback(_say, columns, asked, plot)
        status = stack.enter_context(Console(stderr=True).status("starting"))
        for layout in layouts:
            word = str(layout)
            if word in columns and columns[word].status == "done":
                continue
            file, run_dir = folder / f"{word}-{asked['settings'][:12]}.toml", folder / f"run-{word}"
            write_text(file, to_toml(under(config, layout)))
            watch = partial(_show_step, status, word)
            result, reason = train(
                [str(file), "--max-restarts", "0"], layout.world_size, run_dir, None, watch
            )
            columns[word] = (
                read_run(word, read_metrics(run_dir / "metrics.jsonl"), warmup)
                if result == "done"
                else Column(word, result, reason)
            )
            if output is not None:
                rows = [asdict(column) for column in columns.values()]
                write_json(output, {**record.describe("layouts"), "options": asked, "rows": rows})
    outcomes = {column.status for column in columns.values()}
    return int("failed" in outcomes or "done" not in outcomes)


def _show_step(status: Line, layout: str, step: int) -> None:
    status.update(f"{layout}: step {step}")


def _with_data(config: Config, name: str, folder: Path) -> Config:
    """Return the configuration with a dataset: a small one is made if none is given."""
    if config.data.datasets:
        return config
    made = make_data(folder / "data", NETWORKS.get(name, NETWORKS["gpt"]).made_of)
    return config.model_copy(update={"data": config.data.model_copy(update={"datasets": (str(made),)})})


def _facts(config: Config) -> dict[str, Any]:
    """Return what a record says of a configuration and its data, wherever that is."""
    task = open_task(config)
    settings = config.model_copy(update={"data": config.data.model_copy(update={"datasets": ()})})
    read = {"config": to_toml(settings), "data": [dataset.fingerprint for dataset in task.data.datasets]}
    unit, per_step = task.data.unit, task.targets_per_step
    return {"settings": digest_of(read), "steps": config.train.steps, "unit": unit, "per_step": per_step}


def _say(columns: dict[str, Column], asked: dict[str, Any], plot: Path | None) -> None:
    if columns:
        show(table(list(columns.values()), asked))
    done = [column for column in columns.values() if column.status == "done"]
    if done and plot is not None:
        draw(done, asked["config"], plot)


def table(columns: Sequence[Column], asked: dict[str, Any]) -> Table:
    """Return a column for each layout; phases that take no time under any of them are left out."""
    done = [column for column in columns if column.status == "done"]
    texts = {column.layout: column.texts(done[0], asked) for column in done}
    others = [column for column in columns if column.status != "done"]
    shown = make_table(
        ["layout"],
        [column.layout if column in done else f"{column.layout}\n{column.status}" for column in columns],
        [f"{column.layout}: {column.status}: {column.reason}" for column in others],
        f"{asked['config']}: {asked['steps']} steps, the first {asked['warmup']} not timed",
    )
    for label in dict.fromkeys(label for each in texts.values() for label in each):
        cells = [texts.get(column.layout, {}).get(label, "") for column in columns]
        if not {*cells} <= {"", "0.0"}:
            shown.add_row(label, *cells)
    return shown


def draw(done: Sequence[Column], name: str, path: Path) -> None:
    """Plot the phases of a step as stacked bars, and the peak memory beside them."""
    from matplotlib.figure import Figure

    layouts = [column.layout for column in done]
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(done)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    left = [0.0] * len(done)
    for phase in SHOWN_PHASES:
        widths = [column.parts()[phase] for column in done]
        times.barh(layouts, widths, left=left, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    memory.barh(layouts, [column.peak_bytes / 1e6 for column in done], color="tab:grey")
    times.set(xlabel="ms a step", title=f"{name}: a step by phase")
    memory.set(xlabel="peak memory of the rank with most, MB", title="memory")
    times.invert_yaxis()
    for axes in (times, memory):
        axes.set_axisbelow(True)
        axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=8)
    figure.savefig(path, dpi=120)
