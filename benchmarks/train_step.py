"""Tokens/s of a training step: Shoal beside the loops that people write over transformers, litgpt and torch.

On a CPU each peer is timed as it comes, and with what `shoal train` sets in the C library. All train on the
same batches with AdamW, in a process each. Those of one place of the grid (number format; eager or compiled)
are up at the same time and take turns, so that all meet the same machine; on a GPU one after the other, Shoal
first, so that each has all its memory. The record grows with each measurement.

    python -m benchmarks.train_step                                the CPU's record (`make bench-train`)
    python -m benchmarks.train_step --suite gpu                    the GPU's (`make gpu-check PART=train`)
    python -m benchmarks.train_step --tiny --device cpu --output FILE      all paths in a minute
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import c_library
from benchmarks.c_library import SET
from benchmarks.record import RECORDS, write_record
from benchmarks.systems import PACKAGES, SYSTEMS, Cell, Workload
from shoal.config.sections import Model
from shoal.models.counts import flops_per_token
from shoal.models.shape import resolve_shape
from shoal.runtime.device import bf16_is_native
from shoal.train.clock import PHASES
from shoal.train.metrics import read_metrics
from tests.tiny_dataset import write_dataset

ROOT = Path(__file__).resolve().parent.parent
GPT2_IDS = 50_257
WORKLOADS = {
    "cpu": [Workload("cpu-30m", 6, 384, 6, GPT2_IDS, 256, 4, 1, "cpu", threads=2)],
    "gpu": [
        Workload("gpt2", 12, 768, 12, GPT2_IDS, 1024, 32, 4, "cuda", threads=0),
        Workload("gpt2-medium", 24, 1024, 16, GPT2_IDS, 1024, 16, 4, "cuda", threads=0),
    ],
}
TINY = Workload("tiny", 2, 32, 2, 257, 16, 2, 2, "cpu", threads=1)
AIMS = {"gpt2": 460_000, "gpt2-medium": 180_000}  # tokens/s on one H200
ANSWER_S = 900.0  # a cold compile of everything on two slow cores
GRACE_S = 100.0  # what a measurement that has begun may take beyond the time limit


class WorkerError(Exception):
    """A system did not run; the message is the last thing it said."""


class Worker:
    """The process of one cell."""

    def __init__(self, cell: Cell, data: Path, folder: Path, warmup: int, deadline: float) -> None:
        self.cell, self.folder, self._deadline = cell, folder, deadline
        folder.mkdir(parents=True)
        self._log = (folder / "log").open("w+")
        arguments = ["--data", str(data), "--folder", str(folder / "run"), "--warmup", str(warmup)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.systems", json.dumps(dataclasses.asdict(cell)), *arguments],
            cwd=ROOT,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), **cell.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def answer(self, order: str = "") -> dict[str, Any]:
        """Give an order, or none for the answer to the warm-up, and wait for what comes of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        patience = max(0.0, min(ANSWER_S, self._deadline + GRACE_S - time.monotonic()))
        line = ""
        with contextlib.suppress(BrokenPipeError):
            if order:
                print(order, file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], patience)[0]:
                raise WorkerError(f"no answer within {patience:.0f} s")
            line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        said = [text.strip() for text in self._log.read().splitlines() if text.strip()]
        return said[-1] if said else f"it left with status {self._process.returncode}"

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()


def measure(
    cells: list[Cell], data: Path, folder: Path, *, repeats: int, steps: int, warmup: int, deadline: float
) -> list[dict[str, Any]]:
    """Let the cells take turns; return what each one showed, or why it did not run."""
    workers = [Worker(cell, data, folder / cell.name.replace(" ", "-"), warmup, deadline) for cell in cells]
    results = {worker.cell.name: _entry(worker.cell) for worker in workers}

    def ask(worker: Worker, order: str = "") -> dict[str, Any] | None:
        entry = results[worker.cell.name]
        if "failed" in entry:
            return None
        try:
            return worker.answer(order)
        except WorkerError as error:
            entry["failed"] = str(error)
            print(f"{worker.cell.name}: failed: {error}", flush=True)
            return None

    try:
        for worker in workers:
            ask(worker)
        for repeat in range(repeats):
            if repeat and time.monotonic() > deadline:
                break
            for worker in workers[repeat % len(workers) :] + workers[: repeat % len(workers)]:
                if answer := ask(worker, f"run {steps}"):
                    _add_repeat(results[worker.cell.name], worker.cell, answer)
        for worker in workers:
            entry = results[worker.cell.name]
            if worker.cell.system == "shoal" and entry["step_s"]:
                _add_phases(entry, worker)
        for worker in workers:
            if answer := ask(worker, f"profile {max(1, steps // 3)}"):
                results[worker.cell.name]["top_operations"] = answer["top_operations"]
        for worker in workers:
            if answer := ask(worker, "end"):
                _add_end(results[worker.cell.name], worker, answer)
    finally:
        for worker in workers:
            worker.end()
    return list(results.values())


def _entry(cell: Cell) -> dict[str, Any]:
    return {
        "workload": cell.workload.name,
        "system": cell.system,
        "dtype": cell.dtype,
        "compiled": cell.compiled,
        "with_settings": cell.with_settings,
        "tokens_per_s": [],
        "step_s": [],
    }


def _add_repeat(entry: dict[str, Any], cell: Cell, answer: dict[str, Any]) -> None:
    rate = cell.workload.step_tokens / statistics.median(answer["step_s"])
    entry["step_s"].append([round(seconds, 5) for seconds in answer["step_s"]])
    entry["tokens_per_s"].append(round(rate, 1))
    entry["median_tokens_per_s"] = round(statistics.median(entry["tokens_per_s"]), 1)
    if "loss" in answer:
        entry["loss"] = round(answer["loss"], 4)
    print(f"{cell.name}: {rate:,.0f} tokens/s", flush=True)


def _add_end(entry: dict[str, Any], worker: Worker, answer: dict[str, Any]) -> None:
    """Add what is known at the end: peak memory and MFU."""
    work = worker.cell.workload
    shape = resolve_shape(
        Model(n_layers=work.n_layers, d_model=work.d_model, n_heads=work.n_heads, max_seq_len=work.seq_len),
        work.vocab_size,
    )
    flops = entry["median_tokens_per_s"] * flops_per_token(shape, work.seq_len)
    entry["peak_bytes"] = answer["peak_bytes"]
    entry["matmul_flops"] = answer["matmul_flops"]
    entry["mfu_measured"] = round(flops / answer["matmul_flops"], 4)
    if answer["peak_flops"]:
        entry["mfu"] = round(flops / answer["peak_flops"], 4)


def _add_phases(entry: dict[str, Any], worker: Worker) -> None:
    """Add the parts of Shoal's steps so far: medians of those that were timed."""
    lines = read_metrics(worker.folder / "run" / "metrics.jsonl")[-sum(map(len, entry["step_s"])) :]
    entry["phases"] = {
        f"{phase}_s": round(statistics.median(line[f"{phase}_s"] for line in lines), 5) for phase in PHASES
    }
    entry["loss"] = round(lines[-1]["loss"], 4)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare each system at its own best, peers as they come and with settings, and add the aim."""
    told = {}
    for workload in dict.fromkeys(entry["workload"] for entry in results):
        ran = [entry for entry in results if entry["workload"] == workload and entry["tokens_per_s"]]
        best: dict[str, dict[str, Any]] = {}
        for entry in sorted(ran, key=lambda entry: entry["median_tokens_per_s"]):
            best[entry["system"] + SET * entry["with_settings"]] = entry
        line: dict[str, Any] = {
            name: {
                key: entry.get(key)
                for key in ("dtype", "compiled", "median_tokens_per_s", "mfu", "mfu_measured")
            }
            for name, entry in best.items()
        }
        for with_settings, key in ((False, ""), (True, "_with_settings")):
            peers = [name for name in best if name != "shoal" and name.endswith(SET) == with_settings]
            if "shoal" in best and peers:
                fastest = max(peers, key=lambda name: best[name]["median_tokens_per_s"])
                ratio = best["shoal"]["median_tokens_per_s"] / best[fastest]["median_tokens_per_s"]
                line |= {f"fastest_peer{key}": fastest, f"ratio_to_fastest_peer{key}": round(ratio, 4)}
        if workload in AIMS:
            line["aim_tokens_per_s"] = AIMS[workload]
        told[workload] = line
    return told


def choose_workloads(wish: argparse.Namespace) -> list[Workload]:
    """Return the suite's workloads, or the tiny one, on the device asked for."""
    workloads = [TINY] if wish.tiny else WORKLOADS[wish.suite]
    return [dataclasses.replace(work, device=wish.device or work.device) for work in workloads]


def run_grid(
    wish: argparse.Namespace,
    workloads: list[Workload],
    systems: list[str],
    folder: Path,
    keep: Callable[[list[dict[str, Any]], list[str]], None],
) -> list[dict[str, Any]]:
    """Measure every place of the grid; return results.

    After each measurement `keep` takes the results so far and what the time limit has left out, or may yet.
    """
    vocab_size = workloads[0].vocab_size
    ids = np.random.default_rng(0).integers(0, vocab_size - 1, 20_000 if wish.tiny else 2_000_000)
    data = write_dataset(folder / "data", {"train": [ids]}, vocab_size, vocab_size - 1)
    deadline = time.monotonic() + wish.limit_s
    places: list[list[Cell]] = []
    for compiled in {"both": (True, False), "eager": (False,), "compiled": (True,)}[wish.modes]:
        for work in workloads:
            for dtype in wish.dtypes or dtypes(wish.suite, work):
                ways = (False, True) if work.device == "cpu" and c_library.apply_here() else (False,)
                cells = [
                    Cell(work, system, dtype, compiled, with_settings)
                    for system in systems
                    for with_settings in (ways if system != "shoal" else (False,))
                ]
                places.append(cells)
    results: list[dict[str, Any]] = []
    rounds = together(places)
    for number, cells in enumerate(rounds, start=1):
        if time.monotonic() < deadline:
            counts = {"repeats": wish.repeats, "steps": wish.steps, "warmup": wish.warmup}
            results += measure(cells, data, folder / "cells", **counts, deadline=deadline)
            keep(results, [cell.name for later in rounds[number:] for cell in later])
    return results


def together(places: list[list[Cell]]) -> list[list[Cell]]:
    """Return what is up at the same time: the cells of a place, or on a GPU one cell, Shoal's first."""
    cells = [cell for place in places for cell in place]
    if any(cell.workload.device == "cpu" for cell in cells):
        return places
    return [[cell] for cell in sorted(cells, key=lambda cell: cell.system != "shoal")]


def dtypes(suite: str, work: Workload) -> list[str]:
    """Return the formats worth a place in the suite's grid: a CPU without bf16 products has fp32 alone."""
    if not bf16_is_native(torch.device(work.device)):
        return ["fp32"]
    return ["bf16"] if suite == "gpu" else ["fp32", "bf16"]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", choices=WORKLOADS, default="cpu")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], help="the suite's, if not given")
    parser.add_argument("--modes", choices=["both", "eager", "compiled"], default="both")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a repeat")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin nothing after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="a model of no interest, to try all paths")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the suite's, if not given")
    parser.add_argument("--output", type=Path, help="where the record goes; benchmarks/records if not given")
    return parser.parse_args(argv)


def main() -> None:
    wish = arguments()
    absent = [name for name in wish.systems if name in PACKAGES and importlib.util.find_spec(name) is None]
    for name in absent:
        print(f"{name} is not installed: left out", flush=True)
    systems = [name for name in wish.systems if name not in absent]
    workloads = choose_workloads(wish)
    output = wish.output or RECORDS / f"{wish.suite}_train.json"

    def keep(results: list[dict[str, Any]], left_out: list[str]) -> None:
        figures = {
            "summary": summary(results),
            "absent": absent,
            "left_out_by_time": left_out,
            "settings": {"repeats": wish.repeats, "steps": wish.steps, "warmup": wish.warmup},
            "peer_versions": {name: version(name) for name in systems if name in PACKAGES},
            "c_library_settings": c_library.SETTINGS,
            "workloads": [dataclasses.asdict(work) for work in workloads],
            "results": results,
        }
        write_record(output.stem, figures, output.parent)

    with tempfile.TemporaryDirectory(prefix="train-step-") as name:
        told = summary(run_grid(wish, workloads, systems, Path(name), keep))
    print(json.dumps(told, indent=2))
    ratios = ("ratio_to_fastest_peer", "ratio_to_fastest_peer_with_settings")
    behind = [
        name
        for name, line in told.items()
        if "shoal" not in line or min(line.get(ratio, 1) for ratio in ratios) < 1
    ]
    if behind and not wish.tiny:
        sys.exit(f"error: shoal is slower than a peer, or did not run, on {', '.join(behind)}")


if __name__ == "__main__":
    main()
