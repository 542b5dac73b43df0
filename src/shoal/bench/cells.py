"""Cell of a grid of trainings: one `shoal train` on this host or on two, and its result."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from shoal.bench.hosts import NAMES, TwoHosts
from shoal.bench.measured import MeasuredRun, measured
from shoal.comm.slow_transport import MBIT
from shoal.config.load import config_from_toml, validate
from shoal.config.sections import Runtime
from shoal.config.sync_rules import STRATEGIES
from shoal.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, nearest
from shoal.launch import forking
from shoal.plan.link_cost import all_reduce_cost, parse_rate
from shoal.runtime.device import choose_threads
from shoal.runtime.files import write_json
from shoal.tasks.choose import open_task
from shoal.train.metrics import read_metrics

_POLL_S = 0.3
_PATIENCE_S = 30.0
_TAIL_BYTES = 4096  # of the end of metrics.jsonl, with its last line
_LAST_WORDS = 300  # of an error, in characters

Status = Literal["done", "refused", "failed"]


@dataclass(frozen=True)
class Way:
    """Strategy with its settings."""

    word: str  # as given: diloco, or diloco:every=50,int8=true
    name: str
    settings: dict[str, Any]

    @property
    def period(self) -> int:
        """Steps between two exchanges; 0 if steps do not repeat in a pattern."""
        if STRATEGIES[self.name].kind == "asynchronous":  # some steps wait, others do not
            return 0
        return int(self.settings.get("every", 1))

    @property
    def is_uncounted(self) -> bool:
        """Return whether the back end sums by itself, so that no transport counts the bytes."""
        return self.name == "allreduce" and self.settings.get("algorithm", "backend") == "backend"

    @property
    def warmup_steps(self) -> int:
        return int(self.settings.get("warmup_steps", 0))


def parse_way(word: str, steps: int) -> Way:
    """Parse a strategy and its settings; add defaults for a run of this many steps.

    Raises:
        InputError: A strategy or setting is unknown, or a value is not allowed.
    """
    name, _, rest = word.partition(":")
    if name not in STRATEGIES:
        raise InputError(f"unknown strategy {name!r}", hint=nearest(name, STRATEGIES))
    given = {key: value for key, _, value in (pair.partition("=") for pair in rest.split(",") if pair)}
    sync = validate({"sync": {"strategy": name, **given}}, f"--strategies {word}").sync
    reads, settings = STRATEGIES[name].reads, {key: getattr(sync, key) for key in given}
    if "warmup_steps" in reads:
        settings.setdefault("warmup_steps", steps // 10)
    if "every" in reads:
        every = settings.setdefault("every", max(1, min(100, steps // 4)))
        if "fragments" in reads:
            between = every // settings.setdefault("fragments", min(2, every))
            settings.setdefault("overlap", max(0, min(5, between - 1)))
    return Way(word, name, settings)


@dataclass(frozen=True)
class Network:
    """Network with its data."""

    name: str
    config: str  # a preset or a TOML file
    data: Path
    global_batch_size: int
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """Training with one strategy, number of workers and link."""

    network: Network
    way: Way
    workers: int
    link: str  # local; hosts: two hosts without a limit; or a rate
    steps: int
    layout: str = ""
    slowed: bool = False  # the link is simulated by delays in the transport, on one host

    @property
    def name(self) -> str:
        words = [self.network.name, f"x{self.workers}", self.layout, self.way.word, self.link]
        words += ["delays"] * self.slowed
        return " ".join(word for word in words if word)

    def words(self) -> list[str]:
        """Return the arguments that do not depend on the host."""
        batch = self.network.global_batch_size
        settings = {
            "train.steps": self.steps,
            "train.global_batch_size": batch,
            "train.micro_batch_size": max(1, batch // self.workers),
            "eval.every": max(1, self.steps // 8),
            "checkpoint.every": 0,
            "train.compile": "off",
            "runtime.threads": choose_threads(Runtime(), self.workers)[0],  # both hosts are this machine
            "sync.strategy": self.way.name,
            **{f"sync.{name}": str(value).lower() for name, value in self.way.settings.items()},
            **self.network.settings,
        }
        if self.slowed:
            settings["runtime.slow_link"] = parse_rate(self.link) / MBIT
        words = [self.network.config, "--data", str(self.network.data), "--max-restarts", "0"]
        words += ["--layout", self.layout] if self.layout else []
        return words + [f"--{name}={value}" for name, value in settings.items()]


@dataclass(frozen=True)
class CellResult:
    """Result of a cell: the measurements, or the reason why there are none."""

    cell: Cell
    status: Status
    found: MeasuredRun | None = None
    reason: str = ""

    def as_record(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        cell, found = self.cell, self.found
        record: dict[str, Any] = {
            "network": cell.network.name,
            "workers": cell.workers,
            "link": cell.link,
            "delays_in_transport": cell.slowed,
            "layout": cell.layout,
            "strategy": cell.way.word,
            "sync": cell.way.settings,
            "settings": cell.network.settings,
            "global_batch_size": cell.network.global_batch_size,
            "status": self.status,
        }
        if found is None:
            return record | {"reason": self.reason}
        summary = ("seconds_a_step", "bytes_a_step", "communication_share")
        return record | {name: getattr(found, name) for name in summary} | asdict(found)


def run(cell: Cell, folder: Path, hosts: TwoHosts | None, watch: Callable[[int], None]) -> CellResult:
    """Train, reporting the steps done to `watch`. A finished run is read, a begun one continues."""
    run_dir = folder / re.sub(r"[^\w.=]+", "-", cell.name)
    status, reason = train(cell.words(), cell.workers, run_dir, hosts, watch)
    return CellResult(cell, status, _measure(cell, run_dir) if status == "done" else None, reason)


def train(
    asked: Sequence[str], workers: int, run_dir: Path, hosts: TwoHosts | None, watch: Callable[[int], None]
) -> tuple[Status, str]:
    """Run `shoal train` with these arguments; return what became of it, and the reason if it is not done.

    A folder with a finished run of the same arguments stays as it is, a begun one continues.
    """
    finished = run_dir / "cell.json"
    if run_dir.exists() and _read_words(run_dir / "asked.json") != list(asked):
        shutil.rmtree(run_dir)
    if not finished.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / "asked.json", list(asked))
        status = _train(asked, workers, run_dir, hosts, watch)
        if status != EXIT_DONE:
            return "refused" if status == EXIT_BAD_INPUT else "failed", _why(run_dir)
        write_json(finished, {"status": status})
    return "done", ""


def _read_words(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _train(
    asked: Sequence[str], workers: int, run_dir: Path, hosts: TwoHosts | None, watch: Callable[[int], None]
) -> int:
    """Run the command, with two hosts half of the workers on each; return the first status that is not 0."""
    words = ["train", *asked, "--run-dir", str(run_dir)]
    with contextlib.ExitStack() as stack:
        children: list[forking.Child | subprocess.Popen[Any]] = []
        screens = [stack.enter_context((run_dir / f"screen-{name}").open("w")) for name in NAMES]
        if hosts is None:
            words += ["--nproc", str(workers)]
            screen = screens[0].fileno()
            children.append(forking.start(words, output=screen, errors=screen))
            stack.callback(_end, children[0])
        else:
            words += ["--nproc", str(workers // 2), "--nnodes", "2", "--rdzv", hosts.rdzv]
            command = [sys.executable, "-m", "shoal", *words]
            for name, output in zip(NAMES, screens, strict=True):
                stack.callback(hosts.kill, name)
                children.append(hosts.start(name, command, stdout=output))
        while None in (codes := [child.poll() for child in children]) and not any(codes):
            watch(_steps_done(run_dir))
            time.sleep(_POLL_S)
        for child in children:  # after a failure the other host reports too
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_PATIENCE_S)
        return next((code for code in codes if code), EXIT_DONE)


def _end(child: forking.Child | subprocess.Popen[Any]) -> None:
    """Kill a launcher; its ranks end with it."""
    child.send_signal(signal.SIGKILL)
    child.wait()


def _steps_done(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        found = re.findall(rb'^{"step": (\d+)', file.read(), re.MULTILINE)
    return int(found[-1]) if found else 0


def _why(run_dir: Path) -> str:
    """Return the error message with which a command ended."""
    for name in NAMES:
        text = (run_dir / f"screen-{name}").read_text(errors="replace").strip()
        if "error: " in text:
            return " ".join(text.rpartition("error: ")[2].partition("\n  hint:")[0].split())[:_LAST_WORDS]
    text = (run_dir / f"screen-{NAMES[0]}").read_text(errors="replace").strip()
    return " ".join(text.rpartition("\n")[2].split())[-_LAST_WORDS:] or "it ended without a word"


def _measure(cell: Cell, run_dir: Path) -> MeasuredRun:
    by_formula, way = None, cell.way
    task = open_task(config_from_toml((run_dir / "config.toml").read_text(), str(run_dir)))
    if way.is_uncounted and not cell.layout:  # a chunked ring, with gloo and NCCL
        by_formula = all_reduce_cost("chunked_ring", cell.workers, 4 * task.num_parameters).num_bytes
    return measured(
        read_metrics(run_dir / "metrics.jsonl"),
        warmup_steps=way.warmup_steps,
        period=way.period,
        by_formula=by_formula,
        steps_per_epoch=float(task.data.samples("train").counts.sum()) / cell.network.global_batch_size,
    )
