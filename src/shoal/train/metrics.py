"""Metrics of a run: metrics.jsonl (every step, the truth), sinks, console lines, the loss curve."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.gradsync.replicas import SynchronousReplicas
from shoal.runtime.files import append_json, reading, write_text
from shoal.runtime.log import log
from shoal.runtime.memory import memory_use
from shoal.runtime.process import Process
from shoal.runtime.run_folder import clear_way
from shoal.runtime.speed import measured_flops, peak_flops
from shoal.tasks.task import Task
from shoal.train.clock import PHASES, Rates, StepClock, StepTime
from shoal.train.curve import draw_curve
from shoal.train.precision import Precision
from shoal.train.schedule import learning_rate
from shoal.train.sinks import Sinks

_FORMATS = {"perplexity": ".2f"}  # on the console
_SHORT = ("data", "fwd", "bwd", "tp", "shard", "bubble", "comm", "opt")  # PHASES on the console


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
        replica_groups: int = 1,
    ) -> None:
        """Begin; rates are those of all replica groups, taken to be as fast as this one."""
        self._path = run_dir / "metrics.jsonl"
        self._config = config = task.config
        self._process = process
        self._clock = clock
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
        self._replicas = SynchronousReplicas()
        self._sent_bytes = 0

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
        self._sinks.start(step)

    def logs(self, step: int) -> bool:
        """Say whether a step has a line on the console."""
        return step % self._config.train.log_every == 0 or step in (1, self._config.train.steps)

    def facts(self, step: int, *, applied: bool, skipped: int, scale: float) -> StepFacts:
        """End a step on the clock; return what the host knows of it.

        `skipped` counts the steps left out so far, this one included.
        """
        time = self._clock.end()
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
            log.info(self._console_line(line))
        self._write(line)

    def _by_rank(self, line: dict[str, Any]) -> dict[str, float]:
        """Return sums over ranks, and which rank has least and most of what differs between them.

        Collective over the world.
        """
        use = memory_use(self._process.device)
        waited_ms = line["tp_ms"] + line["shard_ms"]
        busy_ms = line["forward_ms"] + line["backward_ms"] + line["optimiser_ms"] - waited_ms
        ranks = self._process.gather(use.allocated_bytes, use.peak_bytes, use.reserved_bytes, busy_ms)
        allocated, peak, reserved, busy = zip(*ranks, strict=True)
        found = {
            "allocated_bytes": sum(allocated),
            "peak_bytes": sum(peak),
            "reserved_bytes": sum(reserved),
        }
        for name, values in (("peak_bytes", peak), ("busy_ms", busy)):
            for kind, chosen in (("least", min(values)), ("most", max(values))):
                found |= {f"{kind}_{name}": chosen, f"{kind}_{name}_rank": values.index(chosen)}
        return found

    def record_evaluation(self, step: int, name: str, found: dict[str, float]) -> None:
        """Record what a split was found to have: its mean loss, and what goes with it."""
        shown = ", ".join(f"{key} {value:{_FORMATS.get(key, '.4f')}}" for key, value in found.items())
        log.info(f"step {step}: {name} {shown}")
        self._write({"step": step, **{f"{name}_{key}": value for key, value in found.items()}})

    def record_save(self, step: int, held_s: float) -> None:
        """Record for how long a save held training up."""
        self._write({"step": step, "save_held_s": held_s})

    def record_round(self, step: int, **facts: Any) -> None:
        """Record an exchange between replicas that train apart, when its outcome is in the weights."""
        self._write({"step": step, **facts})

    def finish(self, *, complete: bool) -> None:
        """Close the sinks, draw the curve of a run that is complete, and say where things are."""
        self._sinks.close()
        if complete and self._process.rank == 0:
            curve = draw_curve(read_metrics(self._path), self._path.with_name("loss.png"), self.rates.unit)
            log.info(f"done: {self._path.parent}" + (f"; curve: {curve}" if curve else ""))

    def _console_line(self, line: dict[str, Any]) -> str:
        steps, unit = self._config.train.steps, self.rates.unit
        left_s = (steps - line["step"]) * line["step_ms"] / 1e3
        mfu, basis = (line["mfu"], "peak") if line["mfu"] is not None else (line["mfu_measured"], "matmul")
        memory = "/".join(f"{line[f'{name}_bytes'] / 1e9:.2f}" for name in ("allocated", "peak", "reserved"))
        split = " ".join(
            f"{short} {line[f'{name}_ms'] / line['step_ms']:.0%}"
            for name, short in zip(PHASES, _SHORT, strict=True)
            if name not in ("tp", "shard", "bubble") or line[f"{name}_ms"]
        )
        fp16 = f" | loss scale {line['loss_scale']:g}" if line["loss_scale"] != 1 else ""
        if self._process.world_size > 1:
            least, most = line["least_peak_bytes"] / 1e9, line["most_peak_bytes"] / 1e9
            split += (
                f" | by rank: peak {least:.2f} to {most:.2f} GB (most: {line['most_peak_bytes_rank']}), "
                f"busy {line['least_busy_ms']:.0f} to {line['most_busy_ms']:.0f} ms "
                f"(most: {line['most_busy_ms_rank']})"
            )
        left_out = f" | {line['skipped']} steps skipped" if line["skipped"] else ""
        return (
            f"step {line['step']:>{len(str(steps))}}/{steps} | {line['step_ms']:.0f} ms | "
            f"lr {line['lr']:.2e} | loss {line['loss']:.4f} | norm {line['grad_norm']:.3f} | "
            f"{line[f'{unit}_per_s']:,.0f} {unit}/s | MFU {mfu:.0%} of {basis} | memory {memory} GB | "
            f"{_duration(left_s)} left | {split}{fp16}{left_out}"
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self._process.rank == 0:
            append_json(self._path, line)
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


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
