"""Tokens/s of two processes under each layout, with plain data parallelism and bare torch as their peers.

Bare torch is timed as it comes, and with what `shoal train` sets in the C library.

On a machine with GPUs: over all of them; with one, sharding by one process, and its offload, beside plain
training.

Each layout is a `shoal train` (or the bare loop under torchrun) of two processes with one thread. All are up
together and take turns of a few steps, in which the others stand still: what else the machine does, all meet
alike. The first six steps of each, in which memory grows, do not count, nor the first of each turn. On GPUs
each layout is measured alone: one that stands still would keep its memory, and its exchanges the GPU.

    python -m benchmarks.layouts [--repeats 8] [--steps 4] [--layouts dp2 zero2x2 ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.c_library import SET, SETTINGS, apply_here
from benchmarks.record import RECORDS, write_record
from shoal.train.metrics import read_metrics
from tests.tiny_dataset import write_dataset

# The head weighs as much as a layer, so that both pipeline parts (3 layers; 2 and the head) do. Replicas and
# shards take one micro-step; a pipeline needs smaller ones, and has replicas with such ones for its peer.
CPU = {
    "n_layers": 5,
    "d_model": 256,
    "n_heads": 4,
    "vocab_size": 3_060,
    "padded_vocab_size": 3_072,
    "seq_len": 256,
    "global_batch_size": 32,
    "micro_batch_size": 16,
    "small_micro_batch_size": 4,
    "dtype": "fp32",
    "split": (3, 2),
}
GPU = CPU | {
    "n_layers": 12,
    "d_model": 768,
    "n_heads": 12,
    "vocab_size": 50_257,
    "padded_vocab_size": 50_304,
    "seq_len": 1024,
    "global_batch_size": 64,
    "micro_batch_size": 8,
    "small_micro_batch_size": 4,
    "dtype": "bf16",
    "split": (),
}
TINY = CPU | {
    "n_layers": 2,
    "d_model": 64,
    "n_heads": 2,
    "global_batch_size": 16,
    "micro_batch_size": 8,
    "split": (),
}
BARE = "bare torch tp2"
OFFLOAD = " offload"
SMALL = " in small micro-batches"
SKIPPED = 6  # steps of each run that do not count
FLOORS = {  # on CPUs, with two processes
    "zero2x2 / dp2": 0.9,
    "zero3x2 / dp2": 0.75,
    "tp2 / bare torch tp2": 1.0,
    f"tp2 / bare torch tp2{SET}": 1.0,
    "pp2 in small micro-batches / (dp2 x bubble formula)": 0.85,
}


def layouts_for(device: str, ranks: int) -> list[str]:
    """Return the layouts that as many ranks can have, the plain one first."""
    sharded = [f"zero{zero}x{ranks}" for zero in (1, 2, 3)]
    if device == "cuda":
        sharded.append(f"zero3x{ranks}{OFFLOAD}")
    if ranks == 1:
        return ["1", *sharded]
    bare = [BARE, *([BARE + SET] if apply_here() else [])] if device == "cpu" else []
    return [f"dp{ranks}", *sharded, f"tp{ranks}", *bare, f"dp{ranks}{SMALL}", f"pp{ranks}{SMALL}"]


class Running:
    """Two or more ranks that train under a layout for as long as they are let."""

    def __init__(self, command: list[str], steps: Path, environment: dict[str, str]) -> None:
        """Start a command that adds a JSON line with its seconds to the file `steps` for each step."""
        self._log = steps.with_name(f"{steps.parent.name}.log").open("w+")
        self._steps = steps
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=os.environ | environment
        )
        self.samples: list[list[dict[str, Any]]] = []

    def turn(self, steps: int, skipped: int) -> None:
        """Go on for some steps and keep what the last ones took; the first ones hold a pause, or a start."""
        self._signal(signal.SIGCONT)
        done = len(self._lines())
        while len(self._lines()) < done + skipped + steps:
            if self._process.poll() is not None:
                self._log.seek(0)
                sys.exit(f"a run ended early:\n{self._log.read()}")
            time.sleep(0.05)
        self._signal(signal.SIGSTOP)
        self.samples.append(self._lines()[done + skipped : done + skipped + steps])

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _lines(self) -> list[dict[str, Any]]:
        lines = read_metrics(self._steps) if self._steps.exists() else []
        return [line for line in lines if "seconds" in line]

    def _signal(self, number: int) -> None:
        for pid in descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Return a process and all below it, parents first."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def start(words: str, work: dict[str, Any], data: Path, run: Path) -> Running:
    """Start `shoal train` under a layout, or the loop that cuts a model by hand."""
    run.mkdir()
    if words.startswith(BARE):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command += ["-m", "benchmarks.bare_tensor_parallel", json.dumps(work), str(run / "metrics.jsonl")]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        settings = SETTINGS if words.endswith(SET) else {}
        return Running(command, run / "metrics.jsonl", environment | settings)
    layout = words.split()[0]
    micro = work[f"{'small_' * words.endswith(SMALL)}micro_batch_size"]
    settings = {f"model.{name}": work[name] for name in ("n_layers", "d_model", "n_heads")}
    settings |= {f"train.{name}": work[name] for name in ("seq_len", "global_batch_size")}
    settings |= {"train.micro_batch_size": micro, "train.log_every": 1}
    settings |= {"model.max_seq_len": work["seq_len"], "train.steps": 100_000, "train.compile": "off"}
    settings |= {"checkpoint.every": 0, "eval.every": 0, "runtime.threads": work.get("threads", 1)}
    settings |= {"precision.dtype": work["dtype"], "runtime.device": work["device"]}
    settings |= {"train.recompute": work.get("recompute", "none")}
    options = [f"--{name}={value}" for name, value in settings.items()]
    if layout.startswith("pp"):
        options += [f"--parallel.split={layers}" for layers in work["split"]]
    if words.endswith(OFFLOAD):
        options.append("--parallel.offload")
    base = [sys.executable, "-m", "shoal", "train", "gpt2", "--data", str(data), "--run-dir", str(run)]
    return Running([*base, "--layout", layout, *options], run / "metrics.jsonl", {})


def measure(
    layouts: list[str], work: dict[str, Any], data: Path, folder: Path, *, repeats: int, steps: int
) -> dict[str, Any]:
    """Start all layouts and let them take turns; return the samples, and the parts of a median step.

    Each turn is a sample. Whoever does not have it stands still, so that all see the same machine.
    """
    running: dict[str, Running] = {}
    try:
        for number, words in enumerate(layouts):
            running[words] = start(words, work, data, folder / f"run-{number}")
            running[words].turn(1, SKIPPED)
            running[words].samples.clear()
        for repeat in range(repeats):
            order = layouts[repeat % len(layouts) :] + layouts[: repeat % len(layouts)]
            for words in order:
                running[words].turn(steps, 1)
            print(f"round {repeat + 1} of {repeats} is done", flush=True)
    finally:
        for one in running.values():
            one.end()
    return {words: figures(one.samples, work) for words, one in running.items()}


def figures(samples: list[list[dict[str, Any]]], work: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens/s of each turn's median step, and the parts of a median step of all turns."""
    step_tokens = work["global_batch_size"] * work["seq_len"]
    rates = [step_tokens / statistics.median(line["seconds"] for line in lines) for lines in samples]
    steps = [line for lines in samples for line in lines]
    parts = [name for name in steps[0] if name.endswith("_s") and name != "save_held_s"]
    return {
        "tokens_per_s": [round(rate, 1) for rate in rates],
        "median_tokens_per_s": round(statistics.median(rates), 1),
        "parts_s": {name: round(statistics.median(line[name] for line in steps), 4) for name in parts},
        "peak_bytes_of_all_ranks": max((line.get("peak_bytes", 0) for line in steps), default=0),
    }


def summary(results: dict[str, Any], work: dict[str, Any], ranks: int) -> dict[str, float]:
    """Return rates as shares of the first layout's; tp also of bare torch, pp of what its bubble leaves."""
    rate = {words: entry["median_tokens_per_s"] for words, entry in results.items()}
    plain, *others = rate
    told = {f"{words} / {plain}": rate[words] / rate[plain] for words in others if SMALL not in words}
    for bare in (BARE, BARE + SET):
        if bare in rate and "tp2" in rate:
            told[f"tp2 / {bare}"] = rate["tp2"] / rate[bare]
    pipeline, peer = f"pp{ranks}{SMALL}", f"dp{ranks}{SMALL}"
    if pipeline in rate and peer in rate:
        micro = work["global_batch_size"] // work["small_micro_batch_size"]
        told["1f1b bubble formula m / (m + p - 1)"] = formula = micro / (micro + ranks - 1)
        told[f"{pipeline} / (dp{ranks} x bubble formula)"] = rate[pipeline] / (rate[peer] * formula)
    return {name: round(value, 4) for name, value in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, help="turns of each layout; 8 if left out, 2 with --tiny")
    parser.add_argument("--steps", type=int, default=4, help="that count in each turn")
    parser.add_argument("--layouts", nargs="+", help="those that the machine allows if left out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a model of no interest, to try all paths")
    parser.add_argument("--output", type=Path, help="where the record goes; benchmarks/records if not given")
    wish = parser.parse_args()
    on_gpus = wish.device == "cuda"
    ranks = torch.cuda.device_count() if on_gpus else 2
    work = (TINY if wish.tiny else GPU if on_gpus else CPU) | {"device": wish.device}
    repeats = wish.repeats or (2 if wish.tiny else 8)
    with tempfile.TemporaryDirectory(prefix="layouts-") as name:
        ids = np.random.default_rng(0).integers(0, work["vocab_size"] - 1, 600_000)
        data = write_dataset(
            Path(name) / "data", {"train": [ids]}, work["vocab_size"], work["vocab_size"] - 1
        )
        layouts = wish.layouts or layouts_for(wish.device, ranks)
        output = wish.output or RECORDS / "layouts.json"
        results: dict[str, Any] = {}
        for number, together in enumerate([[words] for words in layouts] if on_gpus else [layouts]):
            folder = Path(name) / f"round-{number}"
            folder.mkdir()
            results |= measure(together, work, data, folder, repeats=repeats, steps=wish.steps)
            told = summary(results, work, ranks)
            figures = {
                "work": work,
                "c_library_settings": SETTINGS,
                "summary": told,
                "steps": wish.steps,
                "results": results,
            }
            write_record(output.stem, figures, output.parent)
    print(json.dumps(told, indent=2))
    if not (wish.tiny or on_gpus) and (
        missed := [name for name, least in FLOORS.items() if told.get(name, least) < least]
    ):
        sys.exit(f"error: {', '.join(f'{name} is {told[name]}' for name in missed)}")


if __name__ == "__main__":
    main()
