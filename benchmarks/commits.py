"""Time of a step of this code beside that of another commit: the same runs by turns.

Tiny models on several processes show what a step costs beside its computation; larger ones the computation,
the gradient hook, and an exchange over a slow link.

    python -m benchmarks.commits COMMIT [--repeats 5]
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write_record
from tests.tiny_dataset import random_dataset

NAME = "commits"
ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = 5  # first steps of a run
POLL_S = 0.02
SETTINGS = {
    "eval.every": 0,
    "checkpoint.every": 0,
    "train.log_every": 1000,
    "train.compile": "off",
    "precision.dtype": "fp32",
    "runtime.threads": 1,
}
TINY = {"train.seq_len": 16, "train.micro_batch_size": 1, "train.global_batch_size": 8, "train.steps": 205}
LARGE = {
    "model.max_seq_len": 256,
    "model.n_layers": 6,
    "model.d_model": 384,
    "model.n_heads": 6,
    "train.seq_len": 256,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 4,
    "train.steps": 25,
}
CASES: dict[str, dict[str, Any]] = {
    **{f"tiny, {nproc} processes": TINY | {"nproc": nproc} for nproc in (2, 4, 8)},
    **{f"tiny, {layout}": TINY | {"layout": layout} for layout in ("zero3x2", "tp2")},
    "6 layers, 1 process": LARGE | {"nproc": 1, "runtime.threads": 2},
    "6 layers, 2 replicas": LARGE | {"nproc": 2},
    "6 layers, zero3x2": LARGE | {"layout": "zero3x2"},
    "6 layers, 2 replicas, int8 at 200 Mbit/s": LARGE
    | {"nproc": 2, "sync.strategy": "int8", "runtime.slow_link": 200},
}


def unpack(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "src"], stdout=subprocess.PIPE, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


def step_ms(tree: Path, data: Path, run: Path, settings: dict[str, Any]) -> float:
    """Train with the code of a tree; return the mean milliseconds from one line of metrics.jsonl to the next.

    The seconds in the lines do not count: what a step contains may differ between commits.
    """
    options = [f"--{name}={value}" for name, value in (SETTINGS | settings).items()]
    base = [sys.executable, "-m", "shoal", "train", "tiny", "--data", str(data), "--run-dir", str(run)]
    env = os.environ | {"PYTHONPATH": str(tree / "src")}
    process = subprocess.Popen(
        [*base, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    metrics, seen = run / "metrics.jsonl", [(0.0, 0)]  # when so many lines were there
    while process.poll() is None:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines >= LEFT_OUT and lines > seen[-1][1]:
            seen.append((time.monotonic(), lines))
        time.sleep(POLL_S)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    (began, first), (ended, last) = seen[1], seen[-1]
    return round((ended - began) / (last - first) * 1e3, 3)


def compare(cases: dict[str, dict[str, Any]], commit: str, repeats: int) -> dict[str, Any]:
    """Return for each case the samples of both trees and the ratio of their medians, this one's first."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        folder = Path(name)
        unpack(commit, folder / "other")
        data = random_dataset(folder / "data")
        for case, settings in cases.items():
            samples: dict[str, list[float]] = {"this": [], "other": []}
            for repeat in range(repeats):
                for which in sorted(samples, reverse=repeat % 2 == 0):
                    tree = ROOT if which == "this" else folder / "other"
                    run = folder / f"{len(found)}-{which}-{repeat}"
                    samples[which].append(step_ms(tree, data, run, settings))
            this, other = (statistics.median(samples[which]) for which in ("this", "other"))
            found[case] = {"step_ms": samples, "ratio": round(this / other, 3)}
            print(f"{case}: {this:.2f} ms, {other:.2f} at {commit[:7]}: {this / other:.3f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("commit", help="what is compared with")
    parser.add_argument("--repeats", type=int, default=5)
    wish = parser.parse_args()
    words = ["git", "-C", str(ROOT), "rev-parse", wish.commit]
    commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    write_record(NAME, {"other": commit, "cases": compare(CASES, commit, wish.repeats)})


if __name__ == "__main__":
    main()
