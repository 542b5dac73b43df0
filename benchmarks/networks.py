"""The classic networks at the batch sizes of the article: Shoal's trainer beside plain PyTorch, or GPUs.

`trainer`: the loop of `shoal train`, all that belongs to a step included, beside PyTorch's adapter of `shoal
bench networks`, on the same initial weights, batch, threads, number format (fp32) and SGD. Each is a process
of its own; they take turns, so that all meet the same machine. PyTorch runs as it comes, and with the C
library set as `shoal train` sets it. A ratio above 1 means that Shoal is faster.
`gpu`: the adapters on CUDA (`make gpu-check PART=networks`). The record grows with each measurement.

    python -m benchmarks.networks trainer [--networks fcn-r alexnet-r] [--batch 64]
    python -m benchmarks.networks gpu --limit-s 460
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console

from benchmarks.c_library import SET, SETTINGS, WAITING
from benchmarks.record import RECORDS, write_record
from benchmarks.systems import FOREVER, Pace, train_paced
from shoal.bench.environments import FRAMEWORKS
from shoal.bench.networks import MODES, ON_GPU, NetworksOptions, Row, measure, write_inputs
from shoal.bench.samples import random_samples
from shoal.config.load import validate
from shoal.data.prepare.examples import prepare_examples
from shoal.data.prepare.options import PrepareOptions
from shoal.data.synthetic import write_documents
from shoal.networks.description import Resolved, read
from shoal.runtime.cores import physical_cores
from shoal.runtime.device import Device

BATCHES = {  # of the article's Table 7
    "fcn-s": 64,
    "alexnet-s": 16,
    "resnet-50": 16,
    "fcn-r": 1024,
    "alexnet-r": 1024,
    "resnet-56": 128,
    "lstm": 128,
}
PEERS: dict[str, dict[str, str]] = {"pytorch": {}, f"pytorch{SET}": SETTINGS}
LIMIT_S = 1800.0  # of Shoal's process
GRACE_S = 110.0  # that a measurement may take beyond the limit

Facts = dict[str, Any]


def trainer(wish: argparse.Namespace, keep: Callable[[Facts], None]) -> bool:
    """Let Shoal and PyTorch take turns on each network; return whether all was measured."""
    results: dict[str, Facts] = {}
    for name in wish.networks:
        resolved, batch = read(name).resolve(), wish.batch or BATCHES[name]
        options = NetworksOptions(
            (name,), ("pytorch",), MODES[:1], (batch,), (wish.threads,), wish.steps, wish.warmup
        )
        samples: dict[str, list[list[float]]] = {system: [] for system in ("shoal", *PEERS)}
        found = results[name] = {"batch": batch, "parameters": resolved.num_parameters, "step_s": samples}
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            data = write_data(resolved, batch, Path(folder))
            try:
                for repeat in range(wish.repeats):
                    for system in list(samples)[:: -1 if repeat % 2 else 1]:
                        samples[system].append(
                            ours(wish, name, batch, data)
                            if system == "shoal"
                            else plain(options, PEERS[system])
                        )
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found["failed"] = str(error)
        if "failed" not in found:
            medians = {
                system: statistics.median(statistics.median(part) for part in parts)
                for system, parts in samples.items()
            }
            found |= {
                "median_s": medians,
                "ratio": {peer: medians[peer] / medians["shoal"] for peer in PEERS},
            }
        keep({"threads": wish.threads, "networks": results})
        told = found.get("failed") or "median {median_s}, ratio {ratio}".format(**found)
        print(f"{name}, batch {batch}: {told}", flush=True)
    return not any("failed" in found for found in results.values())


def plain(options: NetworksOptions, settings: dict[str, str]) -> list[float]:
    """Return the seconds of the steps of PyTorch's adapter, which inherits variables of the environment."""
    rows: list[Row] = []
    with mock.patch.dict(os.environ, settings):
        measure(options, (), rows.append)
    if rows[0].status != "done":
        raise RuntimeError(f"pytorch {rows[0].status}: {rows[0].reason}")
    return rows[0].samples


def ours(wish: argparse.Namespace, name: str, batch: int, data: Path) -> list[float]:
    """Return the seconds of the steps of Shoal's trainer, from a process of its own."""
    job = {"network": name, "batch": batch, "threads": wish.threads, "warmup": wish.warmup, "data": str(data)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.networks", "worker", "--job", json.dumps(job)],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, **WAITING, "OMP_NUM_THREADS": str(wish.threads)},
        input=f"run {wish.steps}\nend\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(answers) < 2:
        raise RuntimeError(f"Shoal's trainer ended with status {done.returncode}: {done.stderr[-500:]}")
    steps: list[float] = answers[1]["step_s"]
    return steps


def worker(job: Facts) -> None:
    """Train as `shoal train` does, and take orders from stdin; see benchmarks.systems."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    config = validate(
        {
            "model": {"network": job["network"]},
            "data": {"datasets": [job["data"]]},
            "train": {
                "steps": FOREVER,
                "global_batch_size": job["batch"],
                "micro_batch_size": job["batch"],
                **({"seq_len": length} if (length := read(job["network"]).tokens) else {}),
            },
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "clip": 0.0},
            "schedule": {"kind": "constant"},
            "precision": {"dtype": "fp32"},
            "eval": {"every": 0},
            "checkpoint": {"every": 0},
            "guard": {"spike": "warn", "nonfinite": "warn"},
            "runtime": {"device": "cpu", "threads": job["threads"]},
        },
        job["network"],
    )

    def make_pace(device: Device) -> Pace:
        return Pace(device, torch.float32, job["warmup"], answers)

    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        train_paced(config, Path(folder), make_pace)


def write_data(resolved: Resolved, batch: int, folder: Path) -> Path:
    """Make a dataset of what `shoal bench networks` trains on."""
    arrays = np.load(write_inputs(resolved, random_samples(resolved, batch), folder)["data"])
    inputs, targets = arrays["inputs"], arrays["targets"]
    if resolved.is_tokens:
        documents = {name: list(inputs) for name in ("train", "validation")}
        return write_documents(folder / "data", documents, resolved.classes, resolved.classes - 1)
    targets[0] = resolved.classes - 1  # else there would be fewer
    np.savez(folder / "examples.npz", x=inputs, y=targets)
    options = PrepareOptions((str(folder / "examples.npz"),), folder / "data", split="1,0,0")
    return prepare_examples(options, Console(quiet=True)).path


def gpu(wish: argparse.Namespace, keep: Callable[[Facts], None]) -> bool:
    """Measure the adapters on a device, default settings of all networks first; say what is left out."""
    found = tuple(name for name in ON_GPU if name == "pytorch" or importlib.util.find_spec(name))
    left_out = {name: "not tried on a GPU" for name in FRAMEWORKS if name not in ON_GPU}
    left_out |= {name: "not installed here" for name in ON_GPU if name not in found}
    rows: list[Row] = []
    options = NetworksOptions(
        (),
        found,
        steps=wish.steps,
        warmup=wish.warmup,
        threads=(physical_cores(),),
        pythons=dict.fromkeys(found, sys.executable),
        device=wish.device,
    )

    def tell(row: Row) -> None:
        rows.append(row)
        told = f"{row.median_s * 1e3:.2f} ms" if row.status == "done" else f"{row.status}: {row.reason}"
        print(f"{row.cell.name}: {told}", flush=True)
        keep({"device": wish.device, "rows": [asdict(one) for one in rows], "left_out": left_out})

    until = time.monotonic() + wish.limit_s
    for mode in MODES:
        for name in wish.networks:
            if time.monotonic() > until:
                left_out[f"{name} {mode}"] = f"no time left of {wish.limit_s:.0f} s"
                continue
            limit_s = min(GRACE_S, (until + GRACE_S - time.monotonic()) / len(found))
            batches = (wish.batch or BATCHES[name],)
            here = replace(options, networks=(name,), modes=(mode,), batch_sizes=batches, limit_s=limit_s)
            measure(here, (), tell)
    if rows:
        keep({"device": wish.device, "rows": [asdict(one) for one in rows], "left_out": left_out})
    plain_rows = [row for row in rows if row.cell.framework == "pytorch"]
    return bool(rows) and all(row.status == "done" for row in plain_rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("trainer", "gpu", "worker"))
    parser.add_argument("--networks", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--batch", type=int, default=0, help="default: that of the article for each network")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each system (trainer)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of gpu")
    parser.add_argument("--limit-s", type=float, default=460.0, help="begin nothing more after that (gpu)")
    parser.add_argument("--output", type=Path, help="record (default: benchmarks/records/networks_PART.json)")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    wish = parser.parse_args(arguments)
    if wish.part == "worker":
        worker(wish.job)
    output = wish.output or RECORDS / ("gpu_networks.json" if wish.part == "gpu" else "networks_trainer.json")

    def keep(figures: Facts) -> None:
        write_record(output.stem, {"steps": wish.steps, **figures}, output.parent)

    return 0 if {"trainer": trainer, "gpu": gpu}[wish.part](wish, keep) else 1


if __name__ == "__main__":
    sys.exit(main())
