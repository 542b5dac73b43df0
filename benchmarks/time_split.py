"""What timing the phases of a step costs, in tokens/s: one job whose steps are timed, or not, in turn.

Steps with the clock as it is alternate with steps in which `StepClock.phase` does nothing, the order of each
pair drawn at random. A step is timed outside of the clock: wall time, of which the fastest tenth counts, and
processor time of the process, which other programs on the machine disturb less. Noise is what the same figure
says of two halves of the steps with the split off. A record of the flight recorder is timed by itself.

    python -m benchmarks.time_split [--pairs 150] [--shapes tiny small]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import write_record
from shoal.config.load import load_config
from shoal.runtime import process as processes
from shoal.runtime.device import select_device
from shoal.runtime.flight_recorder import FlightRecorder, Issued
from shoal.runtime.stop import Stop
from shoal.train.clock import StepClock
from shoal.train.job import Job, build_job
from shoal.train.request import Request
from shoal.train.step import agree, forward_backward, update
from tests.tiny_dataset import write_dataset

VOCAB_SIZE = 1024
WARM_UP = 5
SHARE = 0.01  # of tokens/s: the most that the time split may cost
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "model": {"n_layers": 2, "d_model": 64, "n_heads": 2, "max_seq_len": 64},
        "train": {"global_batch_size": 8, "micro_batch_size": 2, "seq_len": 64},
    },
    "small": {
        "model": {"n_layers": 4, "d_model": 256, "n_heads": 4, "max_seq_len": 256},
        "train": {"global_batch_size": 8, "micro_batch_size": 4, "seq_len": 256},
    },
}


class Untimed(StepClock):
    """The clock with the time split off."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


def make_job(folder: Path, shape: dict[str, dict[str, Any]], steps: int) -> Job:
    """Build a job of one process and one thread, without validation, saving or compilation."""
    rng = np.random.default_rng(0)
    data = folder / "data"
    if not data.exists():
        write_dataset(data, {"train": [rng.integers(0, VOCAB_SIZE - 1, 500_000)]}, VOCAB_SIZE, VOCAB_SIZE - 1)
    config = load_config(
        "tiny",
        {
            "model": {**shape["model"], "dropout": 0.0},
            "data": {"datasets": [str(data)]},
            "train": {**shape["train"], "steps": steps, "log_every": steps, "compile": "off"},
            "runtime": {"threads": 1},
        },
    )
    request = Request(config, folder / "run")
    request.run_dir.mkdir(exist_ok=True)
    process = processes.join(config.runtime)
    return build_job(request, process, Stop(process, request.run_dir, config.runtime, launched=False))


def step_seconds(job: Job, step: int) -> tuple[float, float]:
    """Run the body of one step as the loop does; return its wall time and its processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    job.clock.begin()
    with job.clock.phase("data"):
        batch = job.task.batch(step)
    update(job, agree(job, batch, forward_backward(job, batch)))
    job.clock.end().read()
    return time.perf_counter() - wall, time.process_time() - processor


def compare(folder: Path, shape: dict[str, dict[str, Any]], pairs: int) -> dict[str, Any]:
    """Take a step with the split on and one with it off, in random order, pair by pair."""
    job = make_job(folder, shape, steps=2 * pairs + WARM_UP)
    clocks = {"on": job.clock, "off": Untimed(job.process.device)}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in clocks}
    order = random.Random(0)
    names = [name for _ in range(pairs) for name in order.sample(list(clocks), 2)]
    for step, name in enumerate(["on"] * WARM_UP + names, start=1):
        job.clock = clocks[name]
        seconds = step_seconds(job, step)
        if step > WARM_UP:
            samples[name].append(seconds)
    job.task.close()
    processes.leave()
    tokens = job.config.train.global_batch_size * job.config.train.seq_len
    best = {name: _tenth(values) for name, values in samples.items()}
    busy = {name: statistics.median(p for _, p in values) for name, values in samples.items()}
    micro_steps = job.config.train.global_batch_size // job.config.train.micro_batch_size
    return {
        "phases_per_step": 5 + 2 * micro_steps,
        "tokens_per_s": {name: round(tokens / value, 1) for name, value in best.items()},
        "processor_ms": {name: round(value * 1e3, 3) for name, value in busy.items()},
        "cost_of_wall_time": round(best["on"] / best["off"] - 1, 5),
        "noise_of_wall_time": round(abs(_tenth(samples["off"][::2]) / _tenth(samples["off"][1::2]) - 1), 5),
        "cost_of_processor_time": round(busy["on"] / busy["off"] - 1, 5),
        "samples_ms": {
            name: " ".join(f"{wall * 1e3:.2f}/{processor * 1e3:.2f}" for wall, processor in values)
            for name, values in samples.items()
        },
    }


def _tenth(samples: list[tuple[float, float]]) -> float:
    """Return the wall time that a tenth of the steps stayed below."""
    return statistics.quantiles([wall for wall, _ in samples], n=10)[0]


def cost_us(call: Callable[[], None]) -> float:
    """Time a call, in microseconds: the best mean of 20 times 1,000."""
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            call()
        best = min(best, time.perf_counter() - start)
    return round(best * 1e3, 3)


def cost_of_a_phase_us() -> float:
    """Time one empty phase by itself."""
    clock = StepClock(select_device("auto", 0, 1))
    clock.begin()

    def phase() -> None:
        with clock.phase("forward"):
            pass

    return cost_us(phase)


def cost_of_a_record_us(folder: Path) -> float:
    """Time what the flight recorder does for one operation between ranks."""
    recorder = FlightRecorder(folder, 0)
    issued = Issued("default", "", torch.zeros(64, 64), lambda: ("all ranks", [0, 1]))
    taken_us = cost_us(lambda: recorder.record("all_reduce", lambda: issued))
    assert not recorder.given_up
    recorder.close()
    return taken_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorded_us = cost_of_a_record_us(Path(folder))
    figures: dict[str, Any] = {"empty_phase_us": cost_of_a_phase_us(), "recorded_operation_us": recorded_us}
    figures["threads"] = 1
    for name in wish.shapes:
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = compare(Path(folder), SHAPES[name], wish.pairs)
            spent_ms = figures[name]["phases_per_step"] * figures["empty_phase_us"] / 1e3
            figures[name]["cost_of_empty_phases"] = round(spent_ms / figures[name]["processor_ms"]["off"], 6)
            print(name, {k: v for k, v in figures[name].items() if k != "samples_ms"}, flush=True)
    write_record("time_split", figures)
    for name in wish.shapes:
        if (cost := figures[name]["cost_of_wall_time"]) > SHARE:
            sys.exit(f"error: the time split costs {cost:.2%} of {name}, more than {SHARE:.0%}")


if __name__ == "__main__":
    main()
