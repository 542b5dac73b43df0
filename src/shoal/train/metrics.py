"""Metrics of a run: metrics.jsonl (every step, the truth), sinks, console, the loss curve."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.gradsync.replicas import SynchronousReplicas
from shoal.runtime.files import append_json, reading, write_text
from shoal.runtime.log import log, show_progress
from shoal.runtime.memory import memory_use
from shoal.runtime.process import Process
from shoal.runtime.run_folder import clear_way
from shoal.runtime.speed import measured_flops, peak_flops
from shoal.tasks.task import Task
from shoal.train import console
from shoal.train.clock import Rates, StepClock, StepTime
from shoal.train.curve import Curve
from shoal.train.precision import Precision
from shoal.train.schedule import learning_rate
from shoal.train.sinks import Sinks

_FORMATS = {"perplexity": ".2f"}  # on the console
_GRADED_STEPS = 20  # of a start, with which its plan is compared


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step that has ended there; the device may still be at it."""

    step: int
    time: StepTime
    line: dict[str, Any]  # of metrics.jsonl, without what the device knows


class Metrics:
    """Records steps on rank 0; the other ranks only take part in sums."""

    def __init__(
        self,
        run_dir: Path,
        task: Task[Any, Any],
        process: Process,
        precision: Precision,
        clock: StepClock,
        parameters: int,
        replica_groups: int = 1,
    ) -> None:
        """Begin; `parameters` are those on this rank.

        Rates are those of all replica groups, taken to be as fast as this one.
        """
        self._path = run_dir / "metrics.jsonl"
        self._config = config = task.config
        self._process = process
        self._clock = clock
        self._parameters = parameters
        self._sinks = Sinks(config.train.sinks if process.rank == 0 else (), config, run_dir)
        self.rates = Rates(
            unit=task.data.unit,
            per_step=task.targets_per_step,
            world_size=process.world_size * replica_groups,
            flops_per_target=task.flops_per_target,
            matmul_flops=measured_flops(process.device, precision.dtype),
            peak_flops=peak_flops(process.device, precision.dtype),
        )
        self.last_loss: float | None = None
        self._curve = Curve(run_dir / "loss.png", task.data.unit)
        self._last_log: dict[str, Any] = {}
        self._replicas = SynchronousReplicas()
        self._sent_bytes = 0
        self._first: list[dict[str, Any]] = []  # lines of this start
        self.grade: Callable[[list[dict[str, Any]]], None] | None = None  # is given them

    def start(self, step: int, replicas: SynchronousReplicas) -> None:
        """Drop what an earlier attempt recorded after the step that this one goes on from; open the sinks.

        Each step from here on records what this rank has sent to agree with others, where `replicas` count,
        and what else that has to tell.
        """
        self._replicas, self._sent_bytes = replicas, replicas.traffic.num_bytes if replicas.traffic else 0
        if self._process.rank == 0 and self._path.exists():
            told, bad = _parse(self._path)
            if bad:
                _set_aside(self._path.with_name(f"{self._path.name}.bad"), bad)
            kept = [line for line in told if line["step"] <= step and "test_loss" not in line]
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
            for line in kept:
                self._curve.add(line)
        self._sinks.start(step)

    def logs(self, step: int) -> bool:
        """Say whether a step has a line on the console."""
        return step % self._config.train.log_every == 0 or step in (1, self._config.train.steps)

    def facts(self, step: int, *, applied: bool, skipped: int, scale: float) -> StepFacts:
        """End a step on the clock; return what the host knows of it.

        `skipped` counts the steps left out so far, this one included.
        """
        time, steps = self._clock.end(), self._config.train.steps
        show_progress(f"step {step}/{steps}  {self._left(step)} left", step / steps)
        line: dict[str, Any] = {
            "step": step,
            self.rates.unit: step * self.rates.per_step,
            "lr": learning_rate(self._config, step, skipped - (not applied)),
            "applied": applied,
            "skipped": skipped,
            "loss_scale": scale,
        }
        if (traffic := self._replicas.traffic) is not None:
            sent, self._sent_bytes = self._sent_bytes, traffic.num_bytes
            line["sync_bytes"] = self._sent_bytes - sent
        line |= self._replicas.figures
        return StepFacts(step, time, line)

    def record(self, facts: StepFacts, *, loss: float, grad_norm: float) -> None:
        """Record one optimiser step by its `facts`, and what the device knew.

        Collective over the world on log steps, for the memory of all ranks.
        """
        seconds, phases = facts.time.read()
        self.rates.add(seconds, phases)
        self.last_loss = loss if math.isfinite(loss) else None
        line = facts.line | {"loss": loss, "grad_norm": grad_norm, "seconds": seconds}
        line |= {f"{name}_s": value for name, value in phases.items()}
        if self.logs(facts.step):
            line |= self.rates.take()
            line |= self._by_rank(line)
            shown = line | {"left": self._left(facts.step)}
            log.info(console.step_lines(shown, self._last_log, self._config.train.steps, self.rates.unit))
            log.debug(console.details(line, self._process.world_size))
            self._last_log = line
        self._write(line)
        if self.grade and len(self._first) < _GRADED_STEPS:
            self._first.append(line)
            if len(self._first) == _GRADED_STEPS:
                self.grade(self._first)

    def _by_rank(self, line: dict[str, Any]) -> dict[str, float]:
        """Return sums over ranks, and which rank has least and most of what differs between them.

        Collective over the world.
        """
        use = memory_use(self._process.device)
        waited_ms = line["tp_ms"] + line["shard_ms"]
        busy_ms = line["forward_ms"] + line["backward_ms"] + line["optimiser_ms"] - waited_ms
        ranks = self._process.gather(
            use.allocated_bytes, use.peak_bytes, use.reserved_bytes, busy_ms, self._parameters
        )
        allocated, peak, reserved, busy, held = zip(*ranks, strict=True)
        found = {
            "allocated_bytes": sum(allocated),
            "peak_bytes": sum(peak),
            "reserved_bytes": sum(reserved),
        }
        for name, values in (("peak_bytes", peak), ("busy_ms", busy), ("parameters", held)):
            for kind, chosen in (("least", min(values)), ("most", max(values))):
                found |= {f"{kind}_{name}": chosen, f"{kind}_{name}_rank": values.index(chosen)}
        return found

    def record_evaluation(self, step: int, name: str, found: dict[str, float]) -> None:
        """Record what a split was found to have: its mean loss, and what goes with it."""
        shown = ", ".join(f"{key} {value:{_FORMATS.get(key, '.4f')}}" for key, value in found.items())
        log.info(f"step {step}: {name} {shown}")
        self._write({"step": step, **{f"{name}_{key}": value for key, value in found.items()}})
        if self._process.rank == 0 and name == "validation":
            self._curve.draw_if_time()

    def record_sample(self, step: int, text: str) -> None:
        """Record text that the model has generated."""
        log.info(console.text_sample(step, text))
        self._write({"step": step, "sample": text})

    def record_save(self, step: int, held_s: float) -> None:
        """Record for how long a save held training up."""
        self._write({"step": step, "save_held_s": held_s})

    def record_round(self, step: int, **facts: Any) -> None:
        """Record an exchange between replicas that train apart, when its outcome is in the weights."""
        self._write({"step": step, **facts})

    def finish(self, *, complete: bool) -> None:
        """Close the sinks, draw the curve, and say where things are."""
        self._sinks.close()
        show_progress("")
        if self._process.rank == 0:
            drawn = self._curve.draw()
            if complete:
                log.info(f"done: {console.short_path(self._path.parent)}" + " (curve: loss.png)" * drawn)

    def _left(self, step: int) -> str:
        return console.duration((self._config.train.steps - step) * (self.rates.recent_s or 0.0))

    def _write(self, line: dict[str, Any]) -> None:
        if self._process.rank == 0:
            append_json(self._path, line)
            self._curve.add(line)
            self._sinks.put(line)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl; what is no record of a step, such as a line cut short by a kill, is left out."""
    return _parse(path)[0]


def _parse(path: Path) -> tuple[list[dict[str, Any]], dict[int, bytes]]:
    """Return the records in metrics.jsonl, and by number what else is in it but a last line cut short."""
    with reading(path):
        *lines, last = path.read_bytes().split(b"\n")
    told, bad = [], {}
    for number, text in enumerate((*lines, last), start=1):
        try:
            record = json.loads(text.decode())
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            told.append(record)
        elif number <= len(lines) and text.strip():
            bad[number] = text
    return told, bad


def _set_aside(path: Path, bad: dict[int, bytes]) -> None:
    clear_way(path)
    with path.open("ab") as file:
        file.writelines(text + b"\n" for text in bad.values())
    first, more = next(iter(bad)), f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    log.warning(f"warning: line {first}{more} of {path.stem} cannot be read: set aside in {path}")
