"""The measuring loop that every framework's adapter runs in: one process, one network, one batch size.

This folder is run by other Pythons than Shoal's: nothing here imports Shoal, and an adapter imports its
framework alone. `main(NAME, "JOB.json")` prints one JSON object a line: `built`, `identity`, `timed`, or
`error`. This file also runs with Python 3.6: annotations with brackets are in quotes.

The job: `network` (its layers with all sizes, see shoal.networks.description), `weights` and `data` (.npz
files of weights by name in PyTorch's layout, and of inputs and targets), `batch`, `threads`, `mode` (default
or tuned), `device` (cpu or cuda), `warmup`, `steps`, `lr`, `momentum`.

An adapter is a module with_NAME.py with a class `Adapter(job, weights)`, which builds the network, the mean
cross-entropy, and SGD with momentum. Its methods:

    versions()           versions of the framework and of the libraries that compute for it
    num_parameters()     trainable numbers, counted by the framework
    put(inputs, targets) a batch, where the framework computes
    identity(batch)      loss of a batch and norm of its gradient; changes no weight
    step(batch)          trains on a batch, and returns the loss where the framework has it, without waiting
    wait()               returns when all that was asked for is computed
    read(loss)           a loss of `step` as a float
    clock()              seconds; only where steps run in another process, which tells when they end
"""

import importlib
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any


def emit(event: str, **facts: Any) -> None:
    """Print one event."""
    print(json.dumps({"event": event, **facts}), flush=True)


def timed(
    adapter: Any,
    batches: "Sequence[Any]",
    warmup: int,
    steps: int,
    clock: "Callable[[], float]" = time.perf_counter,
) -> "tuple[list[float], float, list[float]]":
    """Return the seconds of each step after a warm-up, those of all together, and the losses.

    The total ends when the last loss is read: an adapter that does not wait for its device has short steps
    and a long total, and its row is rejected.
    """
    losses: list[Any] = []
    for number in range(warmup):
        losses.append(adapter.step(batches[number % len(batches)]))
    adapter.wait()
    samples: list[float] = []
    began = clock()
    for number in range(warmup, warmup + steps):
        start = clock()
        losses.append(adapter.step(batches[number % len(batches)]))
        adapter.wait()
        samples.append(clock() - start)
    losses[-1] = adapter.read(losses[-1])
    total = clock() - began
    return samples, total, [loss if isinstance(loss, float) else adapter.read(loss) for loss in losses]


def place_of(cpu: int, folder: str = "/sys/devices/system/cpu") -> "tuple[int, int]":
    """Return what orders logical CPUs so that the first ones are on cores of their own."""
    try:
        with open(f"{folder}/cpu{cpu}/topology/thread_siblings_list", encoding="ascii") as file:
            parts = [part.partition("-") for part in file.read().strip().split(",")]
        return sum(min(cpu, int(last or first) + 1) - min(cpu, int(first)) for first, _, last in parts), cpu
    except (OSError, ValueError):
        return 0, cpu


def peak_bytes(status: str = "/proc/self/status") -> int:
    """Return the most resident memory of this process so far; 0 where the system does not tell it."""
    try:
        with open(status, encoding="utf-8", errors="replace") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0


def main(name: str, job_file: str) -> int:
    """Run a job with the adapter of a name; return the exit status."""
    try:
        import numpy as np

        with open(job_file, encoding="utf-8") as file:
            job = json.load(file)
        if hasattr(os, "sched_setaffinity"):  # before the framework counts the cores
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0), key=place_of)[: job["threads"]])
        weights = dict(np.load(job["weights"], allow_pickle=False))
        data = np.load(job["data"], allow_pickle=False)
        adapter = importlib.import_module(f"with_{name}").Adapter(job, weights)
        emit("built", parameters=adapter.num_parameters(), versions=adapter.versions())
        size = job["batch"]
        inputs, targets = data["inputs"], data["targets"]
        batches = [
            adapter.put(inputs[first : first + size], targets[first : first + size])
            for first in range(0, len(inputs) - size + 1, size)
        ]
        loss, norm = adapter.identity(batches[0])
        emit("identity", loss=loss, gradient_norm=norm)
        clock = getattr(adapter, "clock", time.perf_counter)
        samples, total, losses = timed(adapter, batches, job["warmup"], job["steps"], clock)
        ended = time.time()
        emit("timed", samples=samples, total_s=total, losses=losses, ended=ended, peak_bytes=peak_bytes())
    except Exception as error:
        emit("error", error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc()[-4000:])
        return 1
    return 0
