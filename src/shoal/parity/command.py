"""`shoal parity`: the same steps under several layouts; are their differences rounding, or a bug?"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.config.layout import Layout, parse_layout, under
from shoal.config.sections import Config
from shoal.config.sync_rules import strategy_of
from shoal.data.dataset import open_dataset
from shoal.data.synthetic import write_dataset
from shoal.errors import ConfigError, InputError, counted
from shoal.models.decoder import Decoder
from shoal.models.shape import resolve_shape
from shoal.parity.judge import CURVE, GRADIENT, MOVED, Difference, Judge, LayoutResult, axis_of
from shoal.parity.trial import RunTrial, Trial, TrialResult, run_trial
from shoal.runtime.files import check_targets, write_json
from shoal.train.request import Request
from shoal.worker_pool import WorkerPool

_EVAL_SEQUENCES = 16
_PRELOAD = (
    "shoal.worker_pool",
    "shoal.parity.trial",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
)
_SHAKY = 1e-4  # a floor of the losses above this says more about the learning rate than about layouts


@dataclass
class Laboratory:
    """Runs trials of one configuration; everything it writes goes when the command ends."""

    config: Config
    steps: int
    folder: Path
    pool: WorkerPool
    console: Console
    run: RunTrial
    seconds: float = 0.0  # of the last trial
    _count: int = field(default=0)

    def trial(
        self,
        what: str,
        layout: Layout,
        *,
        is_reference: bool = False,
        reorder: bool = False,
        **settings: Any,
    ) -> list[TrialResult]:
        """Train under a layout and return what each rank saw; `settings` replace some of [train]."""
        self._count += 1
        trial = Trial(
            _with(under(self.config, layout), train=settings),
            self.steps,
            self.folder / "tensors",
            self.folder / f"run-{self._count}",
            is_reference,
            reorder,
        )
        began = time.monotonic()
        with self.console.status(f"{what}: starting") as status:
            outcomes = self.pool.run(
                what,
                lambda word: status.update(f"{what}: {word}"),
                layout.world_size,
                self.run,
                trial,
            )
        self.seconds = time.monotonic() - began
        return outcomes


def parity(
    config: Config,
    layouts: str,
    *,
    reference: str = "1",
    steps: int = 5,
    json: Path | None = None,
    run: RunTrial = run_trial,
) -> int:
    """Compare layouts, print table and results, write them to `json` too; return the exit status.

    `run` is what each rank does.
    """
    if steps < 1:
        raise InputError(f"--steps {steps}: at least 1 is needed")
    if config.model.network != "decoder":
        raise InputError(
            f"model.network = {config.model.network}: parity compares ways to cut a decoder",
            hint="a network of fixed form has one layout, replicas",
        )
    if strategy_of(config).apart:
        raise InputError(
            f"sync.strategy = {config.sync.strategy}: parity compares processes that take the same steps",
            hint="leave the section sync out, or choose a synchronous strategy",
        )
    chosen = [parse_layout(words) for words in layouts.split(",") if words.strip()]
    if not chosen:
        raise InputError("--layouts names no layout", hint='for example --layouts "dp2, tp2, pp2, zero3x2"')
    base = parse_layout(reference)
    check_targets(json)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="shoal-parity-") as temporary:
        folder = Path(temporary)
        (folder / "tensors").mkdir()
        config = _prepare(config, steps, folder)
        for layout in (base, *chosen):
            _check(config, layout)
        size = max(layout.world_size for layout in (base, *chosen))
        with WorkerPool(config.runtime, _PRELOAD, size) as pool:
            laboratory = Laboratory(config, steps, folder, pool, console, run)
            judge = _reference(laboratory, base)
            results = []
            for layout in chosen:
                results.append(_examine(laboratory, judge, layout))
                console.print(escape(f"{results[-1].seconds:5.1f} s  {layout}"), highlight=False)
    _print(console, judge, base, results)
    if json is not None:
        write_json(json, _report(config, judge, base, steps, results))
    return int(any(result.is_bug for result in results))


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    """Return a configuration with some fields of some sections replaced."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=new) for name, new in sections.items()}
    )


def _prepare(config: Config, steps: int, folder: Path) -> Config:
    """Leave out what has nothing to do with the result, and take the sharpest format where none is chosen."""
    runtime, train = config.runtime, config.train
    sequences = min(config.eval.sequences, _EVAL_SEQUENCES)
    config = _with(
        config,
        train={
            "steps": max(train.steps, steps),
            "sinks": (),
            "profile": (),
            "compile": "off" if train.compile == "auto" else train.compile,
        },
        eval={"every": 0, "sequences": sequences},
        precision={"dtype": "fp32"} if config.precision.dtype == "auto" else {},
        runtime={
            "device": "cpu" if runtime.device == "auto" else runtime.device,
            "threads": runtime.threads or 1,
            "max_time_s": 0.0,
            "stop_after": 0,
        },
    )
    if config.data.datasets:
        return config
    data = write_dataset(folder / "data", config, steps)
    return _with(config, data={"datasets": (str(data),), "weights": ()})


def _check(config: Config, layout: Layout, **train: Any) -> None:
    """Refuse what a rule forbids, naming the layout."""
    try:
        Request(_with(under(config, layout), train=train), Path()).check(layout.world_size)
    except ConfigError as error:
        raise ConfigError(f"layout {layout}: {error.message}", hint=error.hint) from error


def _is_allowed(config: Config, layout: Layout, **train: Any) -> bool:
    try:
        _check(config, layout, **train)
    except ConfigError:
        return False
    return True


def _reference(laboratory: Laboratory, base: Layout) -> Judge:
    """Train under the reference's layout, then again in other orders of addition."""
    config = laboratory.config
    name = "one process" if base.world_size == 1 else str(base)
    reference = laboratory.trial(f"reference ({name})", base, is_reference=True)
    said = f"{laboratory.seconds:5.1f} s  reference: {name}"
    orders: list[dict[str, Any]] = [{"micro_batch_size": size} for size in _other_size(config, base)]
    orders += [{"reorder": True}] if config.train.compile == "off" else []
    reordered = [laboratory.trial(f"reference in another order ({name})", base, **order) for order in orders]
    laboratory.console.print(said, highlight=False)
    shape = resolve_shape(config.model, open_dataset(Path(config.data.datasets[0])).vocab_size)
    with torch.device("meta"):
        order = list(Decoder(shape).named_weights())
    return Judge(order, reference, reordered)


def _other_size(config: Config, base: Layout) -> list[int]:
    """Return another micro-batch size, if the layout allows any: the next smaller one, else larger."""
    micro = config.train.micro_batch_size
    sizes = [*range(micro - 1, 0, -1), *range(micro + 1, config.train.global_batch_size + 1)]
    fitting = (size for size in sizes if _is_allowed(config, base, micro_batch_size=size))
    return list(itertools.islice(fitting, 1))


def _examine(laboratory: Laboratory, judge: Judge, layout: Layout) -> LayoutResult:
    """Try a layout; where it differs, try its axes alone to find the one to blame."""
    findings = judge.findings(laboratory.trial(f"layout {layout}", layout))
    result = LayoutResult(layout, findings, judge.below_floor, "", laboratory.seconds)
    if not result.is_bug:
        return result

    def fails(words: str) -> bool | None:
        simpler = parse_layout(words)
        if not _is_allowed(laboratory.config, simpler):
            return None
        findings = judge.findings(laboratory.trial(f"layout {layout}: {words} alone", simpler))
        return any(finding.parts_ways for finding in findings)

    return replace(result, suspect=suspect_of(layout, fails))


def suspect_of(layout: Layout, fails: Callable[[str], bool | None]) -> str:
    """Name the axis that fails by itself; `fails` says None of a layout that no rule allows."""
    words = str(layout).split("*")
    if layout.world_size == 1:
        return "though nothing is cut"
    for word in words:
        if len(words) > 1 and not fails(word):
            continue
        plain, _, extra = word.partition("+")
        if extra and fails(plain) is False:
            what = "sequence parallelism" if extra == "sp" else f"the schedule {extra}"
            return f"in {what} ({plain} without it agrees)"
        return (
            f"in {axis_of(word)} ({word})" if len(words) == 1 else f"in {axis_of(word)} ({word} alone fails)"
        )
    return f"in how {' and '.join(words)} work together (none of them fails alone)"


def _print(console: Console, judge: Judge, base: Layout, results: list[LayoutResult]) -> None:
    """Print differences and what is allowed as a table, then a sentence a layout."""
    other = str(base) if base.world_size > 1 else "one process"
    table = Table("layout", title=f"largest difference from {other}, relative")
    curves = ("loss", "norm", "validation")
    for heading in ("loss", "norm", "valid.", "gradient", "weight"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for result in results:
        cells = [_cell(result.worst(kind)) for kind in (*curves, "gradient", "weight")]
        mark = "[red]bug[/]" if result.is_bug else "[green]rounding[/]"
        table.add_row(str(result.layout), *cells, mark)
    limits = [f"{max(judge.curve_floors[kind], CURVE):.1e}" for kind in curves]
    table.add_section()
    table.add_row("allowed", *limits, f"{GRADIENT:.1e}*", f"{MOVED:.1e}*", "* or floor")
    console.print(table)
    sentences = [result.sentence() for result in results]
    if judge.below_floor:
        sentences.append(
            f"Apart: {counted(len(judge.below_floor), 'tensor')} whose gradient is zero but for rounding: "
            f"{', '.join(judge.below_floor)}."
        )
    if judge.curve_floors["loss"] > _SHAKY:
        sentences.append(
            f"Rounding grows in these steps until the losses differ by {judge.curve_floors['loss']:.1e}: "
            "the gradients of step 1 are the sharper test, or take a smaller --optimizer.lr."
        )
    for sentence in sentences:
        console.print(escape(sentence), highlight=False, soft_wrap=True)


def _cell(finding: Difference | None) -> str:
    if finding is None:
        return "-"
    text = f"{finding.relative(finding.difference):.1e}"
    return f"[red]{text}[/]" if finding.parts_ways else text


def _report(
    config: Config, judge: Judge, base: Layout, steps: int, results: list[LayoutResult]
) -> dict[str, Any]:
    """Return everything as JSON: all numbers are parts of the reference's."""
    return {
        "reference": str(base),
        "steps": steps,
        "dtype": config.precision.dtype,
        "floors": judge.curve_floors,
        "below_floor": judge.below_floor,
        "layouts": [
            {
                "layout": str(result.layout),
                "ranks": result.layout.world_size,
                "verdict": "bug" if result.is_bug else "rounding",
                "sentence": result.sentence(),
                "suspect": result.suspect or None,
                "first": None if result.first is None else _row(result.first),
                "seconds": round(result.seconds, 2),
                "findings": [_row(finding) for finding in result.findings],
            }
            for result in results
        ],
    }


def _row(finding: Difference) -> dict[str, Any]:
    numbers = {
        "difference": finding.relative(finding.difference),
        "floor": finding.relative(finding.floor),
        "allowed": finding.relative(finding.limit),
        "share": finding.share,
    }
    return {
        "kind": finding.kind,
        "name": finding.name,
        "rank": finding.rank,
        "parts_ways": finding.parts_ways,
        **{name: value if math.isfinite(value) else str(value) for name, value in numbers.items()},
    }
