"""Host memory of each rank while a checkpoint of 1.5 billion parameters, cut 4 ways, loads into 2 ranks.

GPT-2 XL with 20 heads, which 4 divides. Four ranks (tp4) save weights and momentum, two others load them, as
`shoal train` does when it resumes, under tp2 and then under ZeRO-3. Needs 13 GB of memory and of disk: with
Adam's two moments and the copy from which training goes on during a save it would be 40 GB, so the optimiser
is SGD with momentum, and no copy is made, because nothing trains here.

    python -m benchmarks.reshard_large [--layers 48] [--folder DIR]
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data_parallel import random_tokens
from benchmarks.record import write_record
from shoal.checkpoint.store import CheckpointStore
from shoal.config.layout import parse_layout, settings_of
from shoal.runtime.allocator import keep_memory
from shoal.runtime.mesh import local
from shoal.train.job import Job
from shoal.train.optimiser import optimiser_tensors
from shoal.train.saving import resume, save
from tests.pool import Pool
from tests.train.ranks import make_job, tiny_config

LIMIT_BYTES = 10**9  # a rank's peak may exceed its share of the states by this much
SAVED = "tp4"
LOADED = ("tp2", "zero3x2")


def values_of(data: Path, words: str, layers: int) -> dict[str, dict[str, Any]]:
    """Return the raw configuration of a layout."""
    return tiny_config(
        data,
        model={"n_layers": layers, "d_model": 1600, "n_heads": 20, "max_seq_len": 1024},
        optimizer={"name": "sgd", "lr": 1e-2},
        parallel=settings_of(parse_layout(words)),
        runtime={"device": "cpu", "threads": 1, "timeout_s": 1800},
    )


def states_of(job: Job) -> list[tuple[str, Tensor, Tensor]]:
    """Return name, weight and momentum of each parameter, as far as this rank has them."""
    weights = job.model.named_weights()
    moments = optimiser_tensors(weights, job.optimiser)
    return [
        (name, local(w.detach()), local(moments[f"{name}.momentum_buffer"])) for name, w in weights.items()
    ]


def write(run_dir: Path, values: dict[str, dict[str, Any]]) -> float:
    """Save a model whose momentum is half of each weight; return the seconds until it was committed."""
    job = make_job(run_dir, values)
    for _, weight, momentum in states_of(job):
        torch.mul(weight, 0.5, out=momentum)
    job.checkpoints._copies.copy = lambda tensors: tensors  # type: ignore[method-assign]
    began = time.perf_counter()
    save(job, 1)
    job.checkpoints.wait()
    return time.perf_counter() - began


class Peak(threading.Thread):
    """Samples this process's anonymous memory until `end`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, memory("RssAnon"))

    def end(self) -> int:
        self._over.set()
        self.join()
        return self.bytes


def memory(field: str) -> int:
    """Read a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def read(run_dir: Path, values: dict[str, dict[str, Any]], source: Path) -> dict[str, Any]:
    """Load as a resuming job does; return this rank's peaks and its share, all in bytes."""
    keep_memory()  # as `shoal train` does
    bare, peak = memory("RssAnon"), Peak()
    peak.start()
    job = make_job(run_dir, values)
    weights = [local(weight.detach()) for weight in job.model.named_weights().values()]
    expected = [float(weight.sum(dtype=torch.float64)) for weight in weights]
    for weight in weights:
        weight.fill_(torch.nan)
    job.checkpoints = CheckpointStore(source / "checkpoints", group=job.process.saving)
    began = time.perf_counter()
    assert resume(job) == 1
    seconds = time.perf_counter() - began
    most, share = peak.end(), 0
    for total, (name, weight, momentum) in zip(expected, states_of(job), strict=True):
        share += weight.nbytes + momentum.nbytes
        assert float(weight.sum(dtype=torch.float64)) == total, name
        assert torch.equal(momentum, weight * 0.5), name
    gc.collect()
    return {
        "share_bytes": share,
        "peak_anonymous_bytes": most,
        "before_the_job_bytes": bare,
        "peak_resident_bytes": memory("VmHWM"),
        "load_s": round(seconds, 1),
    }


def in_new_processes(fn: Any, words: str, *arguments: Any) -> list[Any]:
    """Run on as many new ranks as the layout has: their peaks are of this call alone."""
    pool = Pool()
    try:
        return pool.run(fn, parse_layout(words).world_size, *arguments, timeout=1800)
    finally:
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=wish.folder) as name:
        folder = Path(name)
        data = random_tokens(folder / "data")
        source = folder / SAVED
        save_s = in_new_processes(write, SAVED, source, values_of(data, SAVED, wish.layers))
        sizes = [file.stat().st_size for file in source.rglob("*.safetensors")]
        figures: dict[str, Any] = {
            "claim": "no rank's anonymous memory exceeds its share of the states by more than 1 GB",
            "how": "SGD with momentum in place of Adam, saved without a second copy, to fit into 24 GB",
            "saved_under": SAVED,
            "save_s": round(max(save_s), 1),
            "checkpoint_bytes": sum(sizes),
            "files": len(sizes),
            "loaded_under": {},
        }
        for words in LOADED:
            ranks = in_new_processes(read, words, folder / words, values_of(data, words, wish.layers), source)
            figures["loaded_under"][words] = ranks
            print(words, ranks, flush=True)
    figures["parameters"] = sum(rank["share_bytes"] for rank in figures["loaded_under"]["zero3x2"]) // 8
    excess = [
        rank["peak_anonymous_bytes"] - rank["share_bytes"]
        for ranks in figures["loaded_under"].values()
        for rank in ranks
    ]
    figures["largest_excess_bytes"] = max(excess)
    if wish.layers == parser.get_default("layers"):
        write_record("reshard_large", figures)
    assert max(excess) <= LIMIT_BYTES, excess


if __name__ == "__main__":
    main()
