"""Tokens/s of two processes under each layout, with plain data parallelism and bare torch as their peers.

Every sample is a fresh `shoal train` (or the bare loop under torchrun) of two processes with one thread;
samples of all layouts take turns, and the first two steps of each do not count.

    python -m benchmarks.layouts [--repeats 5] [--steps 6] [--layouts dp2 zero2x2 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import write_record
from shoal.config.layout import parse_layout, settings_of
from shoal.train.metrics import read_metrics
from tests.tiny_dataset import write_dataset

# Nine layers and a small vocabulary: two pipeline parts (5 layers; 4 and the head) weigh about the same.
WORK = {
    "n_layers": 9,
    "d_model": 512,
    "n_heads": 8,
    "vocab_size": 4_000,
    "padded_vocab_size": 4_096,
    "seq_len": 256,
    "global_batch_size": 16,
    "micro_batch_size": 2,
}
STEP_TOKENS = WORK["global_batch_size"] * WORK["seq_len"]
LAYOUTS = ["dp2", "zero1x2", "zero2x2", "zero3x2", "tp2", "pp2"]
BARE = "bare torch tp2"
SKIPPED = 2  # steps of each run that do not count


def train(words: str, data: Path, run: Path, steps: int) -> list[dict[str, Any]]:
    """Run `shoal train` under a layout and return its metrics."""
    layout = parse_layout(words)
    sections = {
        "model": {name: WORK[name] for name in ("n_layers", "d_model", "n_heads")}
        | {"max_seq_len": WORK["seq_len"]},
        "train": {name: WORK[name] for name in ("seq_len", "global_batch_size", "micro_batch_size")}
        | {"steps": steps, "compile": "off"},
        "parallel": settings_of(layout) | ({"split": "[5,4]"} if layout.pp == 2 else {}),
        "precision": {"dtype": "fp32"},
        "checkpoint": {"every": 0},
        "eval": {"every": 0},
        "runtime": {"threads": 1},
    }
    options = []
    for section, values in sections.items():
        for name, value in values.items():
            if name == "split":
                options += [f"--{section}.{name}={n}" for n in (5, 4)]
            elif isinstance(value, bool):
                options.append(f"--{section}.{name}" if value else f"--{section}.no-{name}")
            else:
                options.append(f"--{section}.{name}={value}")
    base = [sys.executable, "-m", "shoal", "train", "gpt2", "--data", str(data), "--run-dir", str(run)]
    command = [*base, f"--nproc={layout.world_size}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line][SKIPPED:]


def train_bare(steps: int) -> list[dict[str, Any]]:
    """Run the loop that cuts a model by hand."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.bare_tensor_parallel", json.dumps(WORK | {"steps": steps})]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [{"seconds": seconds} for seconds in json.loads(done.stdout)][SKIPPED:]


def measure(data: Path, folder: Path, layouts: list[str], repeats: int, steps: int) -> dict[str, Any]:
    """Let all layouts take turns; return the samples, and the parts of a median step."""
    results: dict[str, Any] = {words: {"tokens_per_s": [], "parts_s": {}} for words in layouts}
    for repeat in range(repeats):
        for number, words in enumerate(layouts):
            if words == BARE:
                lines = train_bare(steps)
            else:
                lines = train(words, data, folder / f"run-{repeat}-{number}", steps)
            rate = STEP_TOKENS / statistics.median(line["seconds"] for line in lines)
            results[words]["tokens_per_s"].append(round(rate, 1))
            results[words]["parts_s"] = {
                name: round(statistics.median(line[name] for line in lines), 4)
                for name in lines[0]
                if name.endswith("_s") and name != "save_held_s"
            }
            print(f"{words}: {rate:,.0f} tokens/s", flush=True)
    for entry in results.values():
        entry["median_tokens_per_s"] = statistics.median(entry["tokens_per_s"])
    return results


def summary(results: dict[str, Any]) -> dict[str, float]:
    """Return rates as shares of dp2; tp2 also of bare torch, pp2 of what its bubble leaves."""
    rate = {words: entry["median_tokens_per_s"] for words, entry in results.items()}
    told = {f"{words} / dp2": rate[words] / rate["dp2"] for words in rate if words != "dp2"}
    if BARE in rate and "tp2" in rate:
        told["tp2 / bare torch tp2"] = rate["tp2"] / rate[BARE]
    if "pp2" in rate:
        micro = WORK["global_batch_size"] // WORK["micro_batch_size"]
        told["1f1b bubble formula m / (m + p - 1)"] = micro / (micro + 1)
        told["pp2 / (dp2 x bubble formula)"] = rate["pp2"] / (rate["dp2"] * micro / (micro + 1))
    return {name: round(value, 4) for name, value in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layouts", nargs="+", default=[*LAYOUTS, BARE])
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="layouts-") as name:
        ids = np.random.default_rng(0).integers(0, WORK["vocab_size"] - 1, 300_000)
        splits = {"train": [ids]}
        data = write_dataset(Path(name) / "data", splits, WORK["vocab_size"], WORK["vocab_size"] - 1)
        results = measure(data, Path(name), wish.layouts, wish.repeats, wish.steps)
    told = summary(results)
    print(json.dumps(told, indent=2))
    write_record("layouts", {"work": WORK, "summary": told, "steps": wish.steps, "results": results})


if __name__ == "__main__":
    main()
