"""Tokens/s of two processes of one thread each against one process of two, and what a save costs.

The shape of all CPU comparisons: 6 layers, 384 wide, 6 heads, vocabulary 50,304, 32 sequences of 256 tokens
a step. Runs alternate and each is a fresh `shoal train`; the first step of a run does not count.

    python -m benchmarks.data_parallel [--repeats 5] [--steps 4]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import write_record
from shoal.runtime.device import bf16_is_native
from shoal.train.metrics import read_metrics
from tests.tiny_dataset import write_dataset

VOCAB_SIZE = 50_257
SETTINGS = {
    "model.n_layers": 6,
    "model.d_model": 384,
    "model.n_heads": 6,
    "model.max_seq_len": 256,
    "train.global_batch_size": 32,
    "train.micro_batch_size": 8,
    "train.seq_len": 256,
    "schedule.warmup_steps": 0,
    "eval.every": 0,
}
STEP_TOKENS = 32 * 256
LEAST = {"fp32": 1.0, "bf16": 0.95}  # of two processes beside two threads


def random_tokens(folder: Path) -> Path:
    """Write a dataset of random ids; speed does not depend on them."""
    rng = np.random.default_rng(0)
    splits = {
        name: [rng.integers(0, VOCAB_SIZE - 1, size)] for name, size in (("train", 300_000), ("test", 1000))
    }
    return write_dataset(folder, splits, VOCAB_SIZE, VOCAB_SIZE - 1)


def train(data: Path, run: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `shoal train` with SETTINGS and these instead or besides; return its metrics."""
    options = [f"--{name}={value}" for name, value in (SETTINGS | settings).items()]
    base = [sys.executable, "-m", "shoal", "train", "gpt2", "--data", str(data), "--run-dir", str(run)]
    done = subprocess.run([*base, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(run / "metrics.jsonl")


def tokens_per_s(lines: list[dict[str, Any]]) -> float:
    """Return the rate of a run's median step, the first left out."""
    seconds = [line["seconds"] for line in lines if "loss" in line and line["step"] > 1]
    return STEP_TOKENS / statistics.median(seconds)


def compare(data: Path, folder: Path, dtype: str, repeats: int, steps: int) -> dict[str, Any]:
    """Alternate the two layouts; return their samples and the ratio of medians."""
    samples: dict[str, list[float]] = {"1x2": [], "2x1": []}
    for repeat in range(repeats):
        for layout in samples:
            processes, threads = layout.split("x")
            lines = train(
                data,
                folder / f"{dtype}-{layout}-{repeat}",
                {"nproc": processes, "runtime.threads": threads, "precision.dtype": dtype}
                | {"train.steps": steps, "checkpoint.every": 0},
            )
            samples[layout].append(round(tokens_per_s(lines), 1))
            print(f"{dtype} {layout}: {samples[layout][-1]:,.0f} tokens/s", flush=True)
    medians = {layout: statistics.median(values) for layout, values in samples.items()}
    return {
        "tokens_per_s": samples,
        "medians": medians,
        "ratio_2x1_to_1x2": round(medians["2x1"] / medians["1x2"], 4),
    }


def save_cost(data: Path, folder: Path) -> dict[str, Any]:
    """Save every other step; return how long training waited for the copy, and a step's time."""
    lines = train(data, folder / "saves", {"nproc": 2, "train.steps": 8, "checkpoint.every": 2})
    held = [line["save_held_s"] for line in lines if "save_held_s" in line]
    steps = [line["seconds"] for line in lines if "loss" in line]
    return {
        "held_s": held,
        "step_s": steps,
        "worst_hold_in_steps": round(max(held) / statistics.median(steps), 4),
    }


def shortfalls(figures: dict[str, Any]) -> list[str]:
    """Return the bounds that the figures miss."""
    missed = [
        f"two processes make {ratio} of the tokens/s of two threads in {dtype}"
        for dtype, least in LEAST.items()
        if dtype in figures and (ratio := figures[dtype]["ratio_2x1_to_1x2"]) < least
    ]
    if (held := figures["save"]["worst_hold_in_steps"]) > 1:
        missed.append(f"a save holds training up for {held} steps")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", help="bf16 only where the CPU has it in hardware, if left out")
    wish = parser.parse_args()
    native = bf16_is_native(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = random_tokens(folder / "data")
        figures: dict[str, Any] = {"save": save_cost(data, folder)}
        for dtype in wish.dtypes or (["bf16", "fp32"] if native else ["fp32"]):
            figures[dtype] = compare(data, folder, dtype, wish.repeats, wish.steps)
            print(dtype, figures[dtype]["ratio_2x1_to_1x2"])
    write_record("data_parallel", figures)
    if missed := shortfalls(figures):
        sys.exit(f"error: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
