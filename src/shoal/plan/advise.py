"""`shoal advise`: predict the step of each strategy on a link, and recommend one."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.bench.ranks import on_ranks
from shoal.bench.record import begin, describe
from shoal.config import rules
from shoal.config.layout import Layout, parse_layout, resolve_layout
from shoal.config.sections import Config, Sync
from shoal.config.sync_rules import STRATEGIES, check_sync, reads_reduce_dtype
from shoal.data.synthetic import write_dataset
from shoal.errors import ConfigError, InputError, ShoalError
from shoal.plan.cluster import parse_link
from shoal.plan.link_cost import Link
from shoal.plan.measure import (
    Measurement,
    MeasureOptions,
    compute_time_of_run,
    compute_time_of_step,
    measure,
    ranks_of_run,
    shapes_of,
)
from shoal.plan.sync_cost import (
    ComputeTime,
    Demand,
    Line,
    Replicas,
    Shapes,
    break_even,
    demand,
    seconds,
    step_lines,
)
from shoal.runtime.files import check_targets, write_json
from shoal.tasks.choose import open_task

_PLAIN = "allreduce"
_SLOWER = 1.05  # ratio to all-reduce from which a strategy is named as slower, or compression as worth it
_NEAR = 1.2  # ratio to the fastest step, within which the strategy that changes less is preferred
# Other strategies that change the result, the smallest change first, for an unknown model.
_MILDEST = ("bf16", "int8", "powersgd", "onebit", "topk", "diloco", "streaming_diloco", "block_momentum")
_COMPRESSED = tuple(
    name for name, strategy in STRATEGIES.items() if strategy.kind == "exchange" and not strategy.exact
)


@dataclass(frozen=True)
class AdviseOptions:
    """Options of the command line, besides the configuration."""

    run_dir: Path | None = None  # run whose steps are read
    nproc: int = 0
    layout: str | None = None
    hosts: int = 0
    link: str | None = None
    step_ms: float | None = None
    seconds: float = 20.0
    json: Path | None = None


@dataclass(frozen=True)
class Prediction:
    """Prediction for one strategy, or the reason why it is unsupported."""

    strategy: str
    exact: bool
    refused: str = ""
    step_s: float = math.inf
    work_s: float = 0.0
    waiting_s: float = 0.0  # of a step, for others
    relative: float = math.inf  # relative to plain all-reduce's step
    sent_bytes: float = 0.0
    below_bytes_per_s: float = 0.0  # below it never slower than plain all-reduce; 0: nowhere


@dataclass(frozen=True)
class Basis:
    """Input of the predictions."""

    link: Link
    compute_time: ComputeTime
    replicas: Replicas


def command(config: Config, options: AdviseOptions) -> int:
    """Measure what is not given, print a prediction for each strategy, and recommend one."""
    link = parse_link(options.link) if options.link else None
    _check(options)
    begin()
    layout = _layout(config, options)
    with _with_data(config) as prepared:
        shapes = shapes_of(prepared)
        legal, refused = settle(prepared, layout, open_task(prepared).num_blocks)
        compute_time = _known_compute_time(prepared, options, layout)
        to_measure = MeasureOptions(
            0.0 if link else options.seconds,
            None if compute_time else prepared,
            layout.dp_replicate,
            tuple(legal.values()),
            shapes,
        )
        processes = _processes(options, layout, link)
        found: Measurement | None = on_ranks(processes, "torch", measure, to_measure, runtime=config.runtime)
    if found is None:  # another rank reports
        return 0
    link, compute_time = link or found.link, compute_time or found.compute_time
    if link is None:
        raise ShoalError(
            "the measured times hardly grow with size, so no bandwidth can be fitted",
            hint="give more --seconds, or the link itself, as in --link 1gbit",
        )
    assert compute_time is not None
    gradient_bytes = 2 if config.precision.reduce_dtype == "bf16" else 4
    hosts = options.hosts or (found.hosts if found.hosts > 1 else layout.dp_replicate)
    ranks = layout.world_size // layout.dp_replicate
    basis = Basis(link, compute_time, Replicas(layout.dp_replicate, hosts, ranks, gradient_bytes))
    rows = [*predict(basis, legal, shapes, found.work_s), *refused]
    _print(basis, rows, layout)
    if options.json is not None:
        write_json(options.json, _report(basis, rows, layout))
    return 0


def settle(config: Config, layout: Layout, num_blocks: int) -> tuple[dict[str, Sync], list[Prediction]]:
    """Return the settings of each supported strategy, and a row with the reason for each unsupported one.

    A strategy takes the settings of the configuration that it reads; other settings do not make it
    unsupported.
    """
    legal, refused = {}, []
    for name, strategy in STRATEGIES.items():
        given = {field: getattr(config.sync, field) for field in strategy.reads}
        if "int8" in given and not given["int8"]:
            del given["block"]
        sync = Sync.model_validate({"strategy": name, **given})
        unread = {} if reads_reduce_dtype(name) else {"reduce_dtype": "fp32"}
        precision = config.precision.model_copy(update=unread)
        try:
            check_sync(config.model_copy(update={"sync": sync, "precision": precision}), layout, num_blocks)
            legal[name] = sync
        except ConfigError as error:
            refused.append(Prediction(name, strategy.exact, error.message))
    return legal, refused


def predict(
    basis: Basis, legal: dict[str, Sync], shapes: Shapes, work_s: dict[str, float]
) -> list[Prediction]:
    """Return a row for each strategy, compared with plain all-reduce by the back end."""
    per_byte_s = 1 / basis.link.bytes_per_s
    plain = _lines(basis, demand(Sync(), shapes, basis.replicas), 0.0)
    rows = []
    for name, sync in legal.items():
        asked = demand(sync, shapes, basis.replicas)
        lines = _lines(basis, asked, work_s[name])
        step_s = seconds(lines, per_byte_s)
        rows.append(
            Prediction(
                name,
                STRATEGIES[name].exact,
                step_s=step_s,
                work_s=work_s[name],
                waiting_s=max(0.0, step_s - basis.compute_time.step_s - work_s[name]),  # not -0.0
                relative=step_s / seconds(plain, per_byte_s),
                sent_bytes=asked.sent_bytes,
                below_bytes_per_s=break_even(lines, plain),
            )
        )
    return rows


def advice(rows: Sequence[Prediction]) -> str:
    """Return the recommendation with its reasons, and the strategies to avoid.

    Among the strategies near the fastest, the one that changes the result least is recommended: all-reduce,
    exact strategies, then _MILDEST in order, and the rest.
    """
    open_rows = [row for row in rows if not row.refused]
    plain = next(row for row in open_rows if row.strategy == _PLAIN)
    fastest = min(open_rows, key=lambda row: row.step_s)
    near = [
        row for row in open_rows if row.step_s <= fastest.step_s * _NEAR
    ]  # in the table's order: plain first
    by_name = {row.strategy: row for row in near}
    mild = [by_name[name] for name in _MILDEST if name in by_name]
    chosen = [*(row for row in near if row.exact), *mild, *near][0]
    sentences = [_use(chosen, plain), *_why_not(fastest, chosen)]
    if not chosen.exact:
        exact = min((row for row in open_rows if row.exact), key=lambda row: row.step_s)
        sentences.append(
            f"{chosen.strategy} changes the result: compare losses, or take {exact.strategy}, the fastest "
            f"that does not ({_step(exact.step_s)})."
        )
    compressed = [row for row in open_rows if row.strategy in _COMPRESSED]
    best = min((row.relative for row in compressed), default=0.0)
    if best * _SLOWER > 1:
        first = max(compressed, key=lambda row: row.below_bytes_per_s)
        effect = "slow you down" if best >= 1 else "save less than 5 %"
        sentences.append(
            f"Compression would {effect} here: "
            + ", ".join(f"{row.strategy} {row.relative:.2f}" for row in compressed)
            + f" times the step; {_begins(first)}."
        )
        open_rows = [row for row in open_rows if row not in compressed]
    if slower := [row.strategy for row in open_rows if row.relative > _SLOWER]:
        sentences.append(f"Slower than plain all-reduce here: {', '.join(slower)}.")
    return " ".join(sentences)


def _use(chosen: Prediction, plain: Prediction) -> str:
    if chosen is plain:
        return f"Use {_PLAIN}: {_step(plain.step_s)}."
    return (
        f"Use {chosen.strategy}: {_step(chosen.step_s)} where {_PLAIN} takes {_step(plain.step_s)}, "
        f"{plain.step_s / chosen.step_s:.1f} times as fast."
    )


def _why_not(fastest: Prediction, chosen: Prediction) -> list[str]:
    """Give the reason where what is advised is not the fastest."""
    if round(100 * (chosen.step_s / fastest.step_s - 1)) < 1:
        return ["No strategy is faster."]
    effect = "" if fastest.exact else ", and changes the result" + ("" if chosen.exact else " more")
    return [
        f"{fastest.strategy} is faster ({_step(fastest.step_s)}), but by less than the {_NEAR - 1:.0%} that "
        f"a prediction may be off{effect}."
    ]


def _begins(row: Prediction) -> str:
    if not row.below_bytes_per_s:
        return "it is slower on every link"
    return f"{row.strategy} is the first to pay, below {_rate(row.below_bytes_per_s)}"


def _lines(basis: Basis, asked: Demand, work_s: float) -> tuple[Line, ...]:
    return step_lines(asked, basis.compute_time, work_s, basis.link.latency_s)


def _check(options: AdviseOptions) -> None:
    if options.step_ms is not None and options.step_ms <= 0:
        raise InputError(
            f"--step-ms {options.step_ms:g}: must be above 0", hint="give the milliseconds of a step"
        )
    if options.seconds <= 0:
        raise InputError(
            f"--seconds {options.seconds:g}: must be above 0",
            hint="give the seconds for measuring, such as 20",
        )
    check_targets(options.json)


def _layout(config: Config, options: AdviseOptions) -> Layout:
    """Return the planned layout; reject one without replicas, and numbers of hosts that do not fit."""
    if options.layout is not None:
        layout = parse_layout(options.layout)
    else:
        processes = options.nproc or (ranks_of_run(options.run_dir) if options.run_dir else 2)
        layout = resolve_layout(config.parallel, processes)
    count = layout.dp_replicate
    if count < 2:
        raise InputError(
            f"layout {layout} has one replica: there is nothing to synchronise",
            hint="name one with replicas, such as --layout dp4",
        )
    if options.hosts and (options.hosts < 2 or count % options.hosts):
        raise InputError(
            f"--hosts {options.hosts}: {count} replicas cannot be divided evenly over so many hosts",
            hint="use " + " or ".join(str(n) for n in range(2, count + 1) if count % n == 0),
        )
    rules.check(config, layout.dp)
    return layout


def _known_compute_time(config: Config, options: AdviseOptions, layout: Layout) -> ComputeTime | None:
    if options.step_ms is not None:
        return compute_time_of_step(options.step_ms / 1e3, config, layout.dp)
    if options.run_dir is not None:
        return compute_time_of_run(options.run_dir, config, layout.dp)
    if layout.world_size != layout.dp_replicate:
        raise InputError(
            f"the step of a replica of several ranks ({layout}) is not measured here",
            hint="give a run under this layout, as in shoal advise runs/NAME, or --step-ms",
        )
    return None


def _processes(options: AdviseOptions, layout: Layout, link: Link | None) -> int:
    """Return the number of measuring processes; one, if the link is given."""
    from shoal.runtime.rank_info import read_rank_info

    if options.nproc or read_rank_info():
        return options.nproc
    return 1 if link else layout.world_size


@contextmanager
def _with_data(config: Config) -> Iterator[Config]:
    """Add a dataset of random tokens if a decoder has no data."""
    if config.data.datasets or config.model.network != "decoder":
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="shoal-advise-") as folder:
        data = write_dataset(Path(folder) / "data", config, steps=4)
        section = config.data.model_copy(update={"datasets": (str(data),), "weights": ()})
        yield config.model_copy(update={"data": section})


def _print(basis: Basis, rows: list[Prediction], layout: Layout) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    r, link = basis.replicas, basis.link
    hosts = f"{r.count} hosts" if r.hosts == r.count else f"{r.hosts} hosts, {r.here} replicas on each"
    console.print(
        f"{layout}: {r.count} replicas behind the links of {hosts}; a link carries {_rate(link.bytes_per_s)} "
        f"each way, a message takes {link.latency_s * 1e6:,.0f} us; a step without communication "
        f"{_step(basis.compute_time.step_s)}",
        highlight=False,
    )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("strategy", "s/step", "to all-reduce", "MB/step", "waiting", "pays below", ""):
        table.add_column(heading, justify="left" if heading in ("strategy", "") else "right", no_wrap=True)
    for row in (row for row in rows if not row.refused):
        table.add_row(
            row.strategy,
            f"{row.step_s:.4g}",
            f"{row.relative:.2f}",
            f"{row.sent_bytes / 1e6:,.3g}",
            f"{row.waiting_s / row.step_s:.0%}",
            "" if row.strategy == _PLAIN else _below(row.below_bytes_per_s),
            "exact" if row.exact else "changes the result",
        )
    console.print(table)
    for row in (row for row in rows if row.refused):
        console.print(
            escape(f"{row.strategy} is unsupported here: {row.refused}"), highlight=False, soft_wrap=True
        )
    console.print(escape(advice(rows)), highlight=False, soft_wrap=True)


def _below(bytes_per_s: float) -> str:
    return {0.0: "never", math.inf: "always"}.get(bytes_per_s) or _rate(bytes_per_s)


def _rate(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    size, unit = next((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (0, "k")) if bits >= size)
    return f"{bits / (size or 1e3):.3g} {unit}bit/s"


def _step(step_s: float) -> str:
    return f"{step_s:.3g} s" if step_s >= 1 else f"{step_s * 1e3:.3g} ms"


def _report(basis: Basis, rows: list[Prediction], layout: Layout) -> dict[str, Any]:
    """Return all predictions as JSON; a bandwidth of null means that a strategy always pays."""
    return {
        **describe("advise"),
        "layout": str(layout),
        "link": asdict(basis.link),
        "pace": asdict(basis.compute_time),
        "replicas": asdict(basis.replicas),
        "rows": [
            {"strategy": row.strategy, "exact": row.exact, "refused": row.refused}
            if row.refused
            else {**asdict(row), "below_bytes_per_s": _finite(row.below_bytes_per_s)}
            for row in rows
        ],
        "advice": advice(rows),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
