"""Tokens/s of two processes under each layout, with plain data parallelism and bare torch as their peers.

On a machine with GPUs: over all of them; with one, sharding by one process, and its offload, beside plain
training.

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
import torch

from benchmarks.record import RECORDS, write_record
from shoal.train.metrics import read_metrics
from tests.tiny_dataset import write_dataset

# The head weighs as much as a layer, so that both pipeline parts (3 layers; 2 and the head) do. Replicas and
# shards take one micro-step; a pipeline needs smaller ones, and has replicas with such ones for its peer.
CPU = {
    "n_layers": 5,
    "d_model": 384,
    "n_heads": 6,
    "vocab_size": 4_600,
    "padded_vocab_size": 4_608,
    "seq_len": 256,
    "global_batch_size": 64,
    "micro_batch_size": 32,
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
    "micro_batch_size": 8,
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
SMALL = " in micro-batches of 8"
SKIPPED = 2  # steps of each run that do not count


def layouts_for(device: str, ranks: int) -> list[str]:
    """Return the layouts that as many ranks can have, the plain one first."""
    sharded = [f"zero{zero}x{ranks}" for zero in (1, 2, 3)]
    if device == "cuda":
        sharded.append(f"zero3x{ranks}{OFFLOAD}")
    if ranks == 1:
        return ["1", *sharded]
    bare = [BARE] if device == "cpu" else []
    return [f"dp{ranks}", *sharded, f"tp{ranks}", *bare, f"dp{ranks}{SMALL}", f"pp{ranks}{SMALL}"]


def train(words: str, work: dict[str, Any], data: Path, run: Path, steps: int) -> list[dict[str, Any]]:
    """Run `shoal train` under a layout and return its metrics."""
    layout = words.split()[0]
    micro = 8 if words.endswith(SMALL) else work["micro_batch_size"]
    settings = {f"model.{name}": work[name] for name in ("n_layers", "d_model", "n_heads")}
    settings |= {f"train.{name}": work[name] for name in ("seq_len", "global_batch_size")}
    settings |= {"train.micro_batch_size": micro}
    settings |= {"model.max_seq_len": work["seq_len"], "train.steps": steps, "train.compile": "off"}
    settings |= {"checkpoint.every": 0, "eval.every": 0, "runtime.threads": 1}
    settings |= {"precision.dtype": work["dtype"], "runtime.device": work["device"]}
    options = [f"--{name}={value}" for name, value in settings.items()]
    if layout.startswith("pp"):
        options += [f"--parallel.split={layers}" for layers in work["split"]]
    if words.endswith(OFFLOAD):
        options.append("--parallel.offload")
    base = [sys.executable, "-m", "shoal", "train", "gpt2", "--data", str(data), "--run-dir", str(run)]
    command = [*base, "--layout", layout, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line][SKIPPED:]


def train_bare(work: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Run the loop that cuts a model by hand."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.bare_tensor_parallel", json.dumps(work | {"steps": steps})]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [{"seconds": seconds} for seconds in json.loads(done.stdout)][SKIPPED:]


def measure(
    layouts: list[str], work: dict[str, Any], data: Path, folder: Path, *, repeats: int, steps: int
) -> dict[str, Any]:
    """Let all layouts take turns; return the samples, and the parts of a median step."""
    results: dict[str, Any] = {words: {"tokens_per_s": [], "parts_s": {}} for words in layouts}
    for repeat in range(repeats):
        for number, words in enumerate(layouts):
            if words == BARE:
                lines = train_bare(work, steps)
            else:
                lines = train(words, work, data, folder / f"run-{repeat}-{number}", steps)
            step_tokens = work["global_batch_size"] * work["seq_len"]
            rate = step_tokens / statistics.median(line["seconds"] for line in lines)
            results[words]["tokens_per_s"].append(round(rate, 1))
            results[words]["parts_s"] = {
                name: round(statistics.median(line[name] for line in lines), 4)
                for name in lines[0]
                if name.endswith("_s") and name != "save_held_s"
            }
            if words != BARE:
                logged = max(line.get("peak_bytes", 0) for line in lines)  # the last step's at the least
                results[words]["peak_bytes_of_all_ranks"] = logged
            print(f"{words}: {rate:,.0f} tokens/s", flush=True)
    for entry in results.values():
        entry["median_tokens_per_s"] = statistics.median(entry["tokens_per_s"])
    return results


def summary(results: dict[str, Any], work: dict[str, Any], ranks: int) -> dict[str, float]:
    """Return rates as shares of the first layout's; tp also of bare torch, pp of what its bubble leaves."""
    rate = {words: entry["median_tokens_per_s"] for words, entry in results.items()}
    plain, *others = rate
    told = {f"{words} / {plain}": rate[words] / rate[plain] for words in others if SMALL not in words}
    if BARE in rate and "tp2" in rate:
        told["tp2 / bare torch tp2"] = rate["tp2"] / rate[BARE]
    pipeline, peer = f"pp{ranks}{SMALL}", f"dp{ranks}{SMALL}"
    if pipeline in rate and peer in rate:
        micro = work["global_batch_size"] // 8
        told["1f1b bubble formula m / (m + p - 1)"] = formula = micro / (micro + ranks - 1)
        told[f"{pipeline} / (dp{ranks} x bubble formula)"] = rate[pipeline] / (rate[peer] * formula)
    return {name: round(value, 4) for name, value in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, help="5 on CPUs, 2 on GPUs if left out")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layouts", nargs="+", help="those that the machine allows if left out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a model of no interest, to try all paths")
    parser.add_argument("--output", type=Path, help="where the record goes; benchmarks/records if not given")
    wish = parser.parse_args()
    on_gpus = wish.device == "cuda"
    ranks = torch.cuda.device_count() if on_gpus else 2
    work = (TINY if wish.tiny else GPU if on_gpus else CPU) | {"device": wish.device}
    repeats = wish.repeats or (1 if wish.tiny else 2 if on_gpus else 5)
    with tempfile.TemporaryDirectory(prefix="layouts-") as name:
        ids = np.random.default_rng(0).integers(0, work["vocab_size"] - 1, 600_000)
        data = write_dataset(
            Path(name) / "data", {"train": [ids]}, work["vocab_size"], work["vocab_size"] - 1
        )
        layouts = wish.layouts or layouts_for(wish.device, ranks)
        results = measure(layouts, work, data, Path(name), repeats=repeats, steps=wish.steps)
    told = summary(results, work, ranks)
    print(json.dumps(told, indent=2))
    output = wish.output or RECORDS / "layouts.json"
    figures = {"work": work, "summary": told, "steps": wish.steps, "results": results}
    write_record(output.stem, figures, output.parent)


if __name__ == "__main__":
    main()
