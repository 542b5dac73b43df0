"""Digests of what short trainings end with, one for each layout and each strategy.

Code that moves must not change them: a digest is of all tensors of the last checkpoint, weights, moments and
the strategy's own. Other processors, torch versions and numbers of threads round otherwise, so the record
holds for one kind of machine.

    python -m benchmarks.weights             train, and write the record
    python -m benchmarks.weights --compare   train, and name what is no longer as in the record
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.record import RECORDS, write_record
from tests.proof.layouts import ALL
from tests.tiny_dataset import write_dataset

NAME = "weights"
LAYOUTS = ["1", *ALL.split(", ")]
# Two processes a replica where the strategy can have them; three replicas where they play different parts.
STRATEGIES = {
    "bf16": "dp3",
    "int8": "dp2*tp2",
    "onebit": "dp3",
    "topk": "dp2*zero2x2",
    "powersgd": "dp2*tp2",
    "central_serial": "dp3",
    "central_parallel": "dp3",
    "device_sharded": "dp3",
    "tree_update": "dp3",
    "model_averaging": "dp2",
    "block_momentum": "dp2*tp2",
    "diloco": "dp2",
    "streaming_diloco": "dp2*zero2x2",
}  # async_sgd adds gradients in the order in which they come
SETTINGS = {
    "model.dropout": 0.1,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 12,
    "train.steps": 6,
    "train.compile": "off",
    "train.deterministic": "true",
    "eval.every": 0,
    "checkpoint.every": 3,
    "runtime.threads": 1,
    "runtime.device": "cpu",
    "precision.dtype": "fp32",
}
OF_STRATEGY = {
    "model_averaging": {"sync.every": 2},
    "block_momentum": {"sync.every": 2},
    "diloco": {"sync.every": 2},
    "streaming_diloco": {"sync.every": 4, "sync.fragments": 2, "sync.overlap": 1},
}


def digest(run_dir: Path) -> str:
    """Return the digest of every tensor file below a run folder's newest checkpoints, replicas' included."""
    found = xxhash.xxh3_128()
    for folder in sorted(run_dir.glob("**/checkpoints")):
        newest = max(folder.glob("step-*"))
        for path in sorted(newest.rglob("*.safetensors")):
            content = path.read_bytes()
            end = 8 + int.from_bytes(content[:8], "little")
            header = json.dumps(json.loads(content[8:end]), sort_keys=True)  # written in any order
            found.update(f"{path.relative_to(run_dir)} {header}".encode())
            found.update(content[end:])
    return found.hexdigest()


def train(layout: str, strategy: str, folder: Path) -> str:
    """Train six steps; return the digest."""
    settings = SETTINGS | OF_STRATEGY.get(strategy, {})
    if strategy != "allreduce":
        settings["sync.strategy"] = strategy
    words = [sys.executable, "-m", "shoal", "train", "tiny", "--data", str(folder / "data")]
    words += ["--layout", layout, "--run-dir", str(folder / f"{strategy}-{layout}"), "--max-restarts", "0"]
    done = subprocess.run(
        [*words, *(f"--{name}={value}" for name, value in settings.items())],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{strategy} under {layout}:\n{done.stdout}{done.stderr}")
    return digest(folder / f"{strategy}-{layout}")


def main(arguments: list[str] | None = None) -> int:
    """Train under each layout and strategy; write the record, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compare", action="store_true", help="name what is no longer as in the record")
    compare = parser.parse_args(arguments).compare
    cases = [(layout, "allreduce") for layout in LAYOUTS]
    cases += [(layout, strategy) for strategy, layout in STRATEGIES.items()]
    found = {}
    with tempfile.TemporaryDirectory(prefix="weights-") as name:
        folder = Path(name)
        documents = list(np.random.default_rng(0).integers(0, 256, (8, 1000)))
        write_dataset(folder / "data", {"train": documents, "validation": documents[:1]})
        for layout, strategy in cases:
            key = f"{strategy} under {layout}"
            found[key] = train(layout, strategy, folder)
            print(f"{found[key]}  {key}", flush=True)
    if not compare:
        write_record(NAME, {"settings": SETTINGS, "digests": found})
        return 0
    recorded = json.loads((RECORDS / f"{NAME}.json").read_text())["digests"]
    other = sorted(key for key in found if recorded.get(key) != found[key])
    print("\n".join(f"differs: {key}" for key in other) or f"{len(found)} digests, all as recorded")
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
