"""A corpus 20 times --max-memory through the chain of stages: anonymous memory of all processes, and MB/s.

The text is synthetic: words drawn by their rank (Zipf), documents of 300 words in the mean, every tenth an
equal or near copy of an earlier one. Reading and finding duplicates, then tokenising, each have their peak.
It needs twice the size of the corpus on the disk, beside it.

    python -m benchmarks.large_corpus [--megabytes 10000] [--max-memory 500MB]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.record import write_record
from benchmarks.tokenise import prepare

FILE_MB = 100
WORDS, MEAN_WORDS = 50_000, 300
LIMITS = {"before": 1_000_000_000, "tokenise": 2_000_000_000}
STAGES = """
[repair]
[length]
tokenizer = "estimate"
min_tokens = 40
[dedup]
"""


def write_file(task: tuple[Path, int]) -> int:
    """Write one file of JSON lines; return its size."""
    path, seed = task
    rng = np.random.default_rng(seed)
    letters = np.random.default_rng(0).integers(97, 123, (WORDS, 9)).astype(np.uint8)
    lengths = np.random.default_rng(1).integers(2, 10, WORDS)
    words = [bytes(row[:length]).decode() for row, length in zip(letters, lengths, strict=True)]
    recent: list[list[str]] = []
    with path.open("w") as out:
        while out.tell() < FILE_MB * 1e6:
            kind = rng.random()
            if recent and kind < 0.1:
                chosen = list(recent[rng.integers(len(recent))])
                if kind < 0.06:  # near: one word is another
                    chosen[rng.integers(len(chosen))] = f"changed{rng.integers(10**9)}"
            else:
                ranks = rng.zipf(1.1, int(rng.integers(60, 2 * MEAN_WORDS - 60))) % WORDS
                chosen = [words[rank] for rank in ranks]
                recent = [*recent[-99:], chosen]
            out.write(json.dumps({"text": " ".join(chosen)}) + "\n")
        return out.tell()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=10_000)
    parser.add_argument("--max-memory", default="500MB")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        tasks = [(source / f"{n:04d}.jsonl", n) for n in range(-(-wish.megabytes // FILE_MB))]
        with multiprocessing.Pool(2) as pool:
            size = sum(pool.imap_unordered(write_file, tasks))
        (Path(name) / "stages.toml").write_text(STAGES)
        output = Path(name) / "dataset"
        options = ["--stages", str(Path(name) / "stages.toml"), "--max-memory", wish.max_memory]
        sample = prepare(source, output, *options, "--vocab-size", "32768")
        steps = json.loads((output / "stages/times.json").read_text())
        counters = json.loads((output / "manifest.json").read_text())["counters"]
    figures = {
        "megabytes": round(size / 1e6),
        "max_memory": wish.max_memory,
        "megabytes_per_s": round(size / 1e6 / sample["seconds"], 2),
        **{key: sample[key] for key in ("seconds", "peak_bytes_of")},
        "steps": steps,
        "counters": counters,
    }
    write_record("large_corpus", figures)
    over = {step: peak for step, peak in sample["peak_bytes_of"].items() if peak > LIMITS[step]}
    if over:
        sys.exit(f"error: more memory than {LIMITS}: {over}")


if __name__ == "__main__":
    main()
