"""The measuring loop that every framework's adapter runs in: one process, one network, one batch size.

This folder is run by other Pythons than Shoal's: nothing here imports Shoal, and an adapter imports its
framework alone. `main(NAME, "JOB.json")` prints one JSON object a line: `built`, `identity`, `timed`; or
`left out`, where an adapter raises NotImplementedError; or `error`. This file also runs with Python 3.6:
annotations with brackets are in quotes.

The job: `network` (its layers with all sizes, see shoal.networks.description), `weights` and `data` (.npz
files of weights by name in PyTorch's layout, and of inputs and targets), `batch`, `threads`, `mode` (default
or tuned), `device` (cpu or cuda), `warmup`, `steps`, `lr`, `momentum`; `workers`, which share batch and
threads evenly, `processes` (1, or one for each worker), `ports` (free ones, one for each process) and `rank`
(of this process).

An adapter is a module with_NAME.py with a class `Adapter(job, weights)`, which builds the network, the mean
cross-entropy, and SGD with momentum. With several workers it is the framework's own data parallelism, named
in `mechanism`: each worker takes its part of a batch, in the order of the samples, and normalises by that
part alone. Its methods:

    versions()           versions of the framework and of the libraries that compute for it
    num_parameters()     trainable numbers, counted by the framework
    put(inputs, targets) this process's part of a batch, where the framework computes
    identity(batch)      loss of this process's part of a batch, norm of the gradient of all parts; changes no
                         weight
    step(batch)          trains on a batch, and returns the loss where the framework has it, without waiting
    wait()               returns when all that was asked for is computed
    read(loss)           a loss of `step` as a float, the mean over the workers of this process
    mean(losses)         means over all processes; called only where there are several
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
) -> "tuple[list[float], list[float], float, list[float]]":
    """Return the seconds of each step after a warm-up, of reading its loss, of all together, and the losses.

    An adapter that does not wait for its device has short steps and long reads, and its row is rejected.
    """
    losses, times = [], [clock()]  # two times a step: when it is computed, and when its loss is read
    for number in range(warmup + steps):
        loss = adapter.step(batches[number % len(batches)])
        adapter.wait()
        times.append(clock())
        losses.append(adapter.read(loss))
        times.append(clock())
    times = times[2 * warmup :]
    seconds = [times[n + 1] - times[n] for n in range(2 * steps)]
    return seconds[::2], seconds[1::2], times[-1] - times[0], losses


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


def take_cores(job: "dict[str, Any]") -> None:
    """Keep this process to its part of the first `threads` logical CPUs."""
    allowed = sorted(os.sched_getaffinity(0), key=place_of)[: job["threads"]]
    share = job["threads"] // job["processes"]
    os.sched_setaffinity(0, allowed[job["rank"] * share :][:share] or allowed)


def main(name: str, job_file: str, rank: str = "0") -> int:
    """Run a process of a job with the adapter of a name; return the exit status."""
    try:
        import numpy as np

        with open(job_file, encoding="utf-8") as file:
            job = {**json.load(file), "rank": int(rank)}
        if hasattr(os, "sched_setaffinity"):  # before the framework counts the cores
            take_cores(job)
        weights = dict(np.load(job["weights"], allow_pickle=False))
        data = np.load(job["data"], allow_pickle=False)
        adapter = importlib.import_module(f"with_{name}").Adapter(job, weights)
        mechanism = ""
        if job["workers"] > 1:
            mechanism = getattr(adapter, "mechanism", "")
            if not mechanism:
                raise NotImplementedError("this adapter has no data parallelism on a CPU")
        emit("built", parameters=adapter.num_parameters(), versions=adapter.versions(), mechanism=mechanism)
        inputs, targets, share = data["inputs"], data["targets"], job["batch"] // job["processes"]
        batches = [
            adapter.put(inputs[first : first + share], targets[first : first + share])
            for first in range(job["rank"] * share, len(inputs), job["batch"])
        ]
        mean = adapter.mean if job["processes"] > 1 else list
        loss, norm = adapter.identity(batches[0])
        emit("identity", loss=mean([loss])[0], gradient_norm=norm)
        clock = getattr(adapter, "clock", time.perf_counter)
        samples, reads, total, losses = timed(adapter, batches, job["warmup"], job["steps"], clock)
        facts = {"samples": samples, "reads": reads, "total_s": total, "ended": time.time()}
        emit("timed", **facts, losses=mean(losses), peak_bytes=peak_bytes())
    except NotImplementedError as error:
        emit("left out", reason=str(error))
        return 1
    except Exception as error:
        emit("error", error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc()[-4000:])
        return 1
    return 0
