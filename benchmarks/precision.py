"""Validation loss after training on real text in each number format, against fp32.

The same run from the same start for every format: the source text of Python's standard library, a BPE of 512
ids. A CPU without bf16 products computes them in software, so the default shape is tiny there; --shape small
is for devices that have them.

    python -m benchmarks.precision [--steps 1000] [--dtypes fp32 bf16 fp16] [--shape tiny|small]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write_record
from shoal.train.metrics import read_metrics

VOCAB_SIZE = 512
SHAPES = {  # layers, width, heads, sequence, sequences a step
    "tiny": (2, 64, 2, 64, 8),
    "small": (6, 384, 6, 256, 32),
}
LIMIT = 0.01  # of fp32's validation loss


def options(shape: str, steps: int) -> list[str]:
    """Return the settings that all formats share."""
    layers, width, heads, length, batch = SHAPES[shape]
    return [
        *(f"--model.n_layers={layers}", f"--model.d_model={width}", f"--model.n_heads={heads}"),
        *(f"--model.max_seq_len={length}", f"--train.seq_len={length}", f"--train.steps={steps}"),
        *(f"--train.global_batch_size={batch}", f"--train.micro_batch_size={min(batch, 8)}"),
        *(f"--eval.every={steps // 5}", "--eval.sequences=512", "--checkpoint.every=0"),
        # fp16 is to take its first steps, not to search for its scale through most of a short run
        *("--precision.initial_scale=65536", "--precision.scale_window=200"),
    ]


def train(data: Path, run: Path, dtype: str, arguments: list[str]) -> dict[str, Any]:
    """Run `shoal train`; return its validation losses, its rate and how many steps were left out."""
    began = time.monotonic()
    command = [sys.executable, "-m", "shoal", "train", "tiny", "--data", str(data), "--run-dir", str(run)]
    subprocess.run([*command, f"--precision.dtype={dtype}", *arguments], check=True)
    lines = read_metrics(run / "metrics.jsonl")
    losses = {str(line["step"]): line["validation_loss"] for line in lines if "validation_loss" in line}
    skipped = max(line.get("skipped", 0) for line in lines)
    return {"validation_loss": losses, "skipped_steps": skipped, "seconds": round(time.monotonic() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp16"], default=["bf16", "fp16"])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    wish = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        prepare = (
            "prepare",
            "stdlib",
            "--output",
            str(data),
            "--vocab-size",
            str(VOCAB_SIZE),
            "--split",
            "95,5,0",
        )
        subprocess.run([sys.executable, "-m", "shoal", *prepare], check=True)
        for dtype in ("fp32", *wish.dtypes):
            results[dtype] = train(data, Path(name) / dtype, dtype, options(wish.shape, wish.steps))
    last = {dtype: list(result["validation_loss"].values())[-1] for dtype, result in results.items()}
    apart = {dtype: round(last[dtype] / last["fp32"] - 1, 5) for dtype in wish.dtypes}
    shape = dict(zip(("layers", "width", "heads", "sequence", "batch"), SHAPES[wish.shape], strict=True))
    claim = f"validation loss after {wish.steps} steps within {LIMIT:.0%} of fp32"
    write_record(
        "precision",
        {"claim": claim, "apart": apart, "shape": shape, "vocab_size": VOCAB_SIZE, "results": results},
    )
    print(apart)
    if any(abs(value) > LIMIT for value in apart.values()):
        sys.exit(f"error: not {claim}: {apart}")


if __name__ == "__main__":
    main()
