"""Signatures and near-deduplication in MB/s, in 2 processes, on a JSONL file of sources with near-duplicates.

The files hold the Python sources and documentation of everything installed beside this interpreter, repeated
under changed names up to the size asked for, and for every tenth document a near-duplicate. Signatures are
timed on texts in memory; near-deduplication goes from JSONL files to the file of decisions, documents written
on the way; the chain is `shoal prepare --web --kind code` on the same files, with a vocabulary of 32,768. The
peer is datatrove's MinHash pipeline in an environment of its own, with the same bands and rows.

    python -m benchmarks.dedup [--megabytes 300] [--datatrove PYTHON]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.record import write_record
from shoal.data.prepare.dedup.against import write_range
from shoal.data.prepare.dedup.find import find_duplicates
from shoal.data.prepare.dedup.minhash import Signer
from shoal.data.prepare.dedup.ranges import RangeFiles
from shoal.data.prepare.dedup.settings import DedupSettings
from shoal.data.prepare.engine import Engine, Job

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = 2
RANGE_BYTES, BATCH_BYTES = 16_000_000, 500_000
LEAST_SIGNATURES, LEAST_END_TO_END, LEAST_CHAIN = 50.0, 15.0, 4.0  # MB/s
LEAST_RATIOS = {"signatures": 50.0, "end_to_end": 20.0}  # to datatrove
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt"}
TEXT = pa.schema([("text", pa.large_string())])

DATATROVE = """
import sys, time
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
source, folder, bands, rows, processes = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
config = MinhashConfig(num_buckets=bands, hashes_per_bucket=rows, n_grams=5)
def stage(steps, tasks):
    began = time.monotonic()
    LocalPipelineExecutor(pipeline=steps, tasks=tasks, workers=processes).run()
    print("seconds", time.monotonic() - began)
signature = MinhashDedupSignature(output_folder=f"{folder}/signatures", config=config)
stage([JsonlReader(source), signature], processes)
stage([MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config)], bands)
stage([MinhashDedupCluster(f"{folder}/buckets", f"{folder}/remove", config=config)], 1)
kept = MinhashDedupFilter(input_folder=f"{folder}/remove")
stage([JsonlReader(source), kept, JsonlWriter(f"{folder}/out")], processes)
"""


def documents(rng: random.Random) -> Iterator[str]:
    """Yield installed sources and documentation without end, and near-duplicates of every tenth."""
    found = Path(sysconfig.get_path("purelib")).rglob("*")
    paths = sorted(path for path in found if path.suffix in SUFFIXES and path.is_file())
    for turn in itertools.count():
        for path in paths:
            text = path.read_text(errors="replace")
            if len(text) < 200:
                continue
            # Each turn writes every fifth word another way, so that its documents are new ones.
            text = re.sub(r"\w+", _renamed(turn), text) if turn else text
            yield text
            if rng.random() < 0.1:
                lines = text.splitlines(keepends=True)
                lines[rng.randrange(len(lines))] = f"value_{rng.randrange(10**9)} = {rng.random()}\n"
                yield "".join(lines)


def _renamed(turn: int) -> Any:
    count = itertools.count()
    return lambda word: f"{word[0]}{turn}" if next(count) % 5 == 0 else word[0]


def write_files(folder: Path, megabytes: int) -> tuple[list[Path], int]:
    """Write JSONL files of about RANGE_BYTES each; return them, and the bytes of their texts."""
    paths, size, rng = [], 0, random.Random(0)
    source = documents(rng)
    while size < megabytes * 1e6:
        paths.append(folder / f"{len(paths):04d}.jsonl")
        with paths[-1].open("w") as out:
            while out.tell() < RANGE_BYTES and size < megabytes * 1e6:
                text = next(source)
                size += len(text.encode())
                out.write(json.dumps({"text": text}) + "\n")
    return paths, size


def batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the texts of a JSONL file in batches."""
    texts, size = [], 0
    with path.open() as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
            if size > BATCH_BYTES:
                yield pa.record_batch([pa.array(texts, pa.large_string())], schema=TEXT)
                texts, size = [], 0
    if texts:
        yield pa.record_batch([pa.array(texts, pa.large_string())], schema=TEXT)


class Range:
    """Writes a JSONL file as a range: documents and narrow rows."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._signer = Signer(DedupSettings())

    def run(self, item: dict[str, Any], check: Any) -> dict[str, Any]:
        files = RangeFiles(Path(item["documents"]), Path(item["signatures"]))
        write_range(files, TEXT, batches(Path(item["source"])), self._signer)
        return {"source": item["source"]}


class Signatures(Range):
    """Signs texts that are in memory, and says how long it took."""

    def run(self, item: dict[str, Any], check: Any) -> dict[str, Any]:
        held = list(batches(Path(item["source"])))
        began = time.monotonic()
        for batch in held:
            self._signer.sign(batch.column("text"))
        return {"seconds": time.monotonic() - began}


def chain(source: Path, folder: Path) -> dict[str, Any]:
    """Return seconds and counters of `shoal prepare` with the whole chain, from JSONL to a dataset."""
    command = [sys.executable, "-m", "shoal", "prepare", source, "--web", "--kind", "code"]
    command += ["--vocab-size", "32768", "--workers", str(PROCESSES), "--output", folder]
    began = time.monotonic()
    subprocess.run([*map(str, command)], stdout=subprocess.DEVNULL, check=True)
    seconds = time.monotonic() - began
    steps = json.loads((folder / "stages" / "times.json").read_text())
    counters = json.loads((folder / "manifest.json").read_text())["counters"]
    return {"seconds": round(seconds, 1), "steps": steps, "counters": counters}


def peer(python: str, source: Path, folder: Path) -> dict[str, float]:
    """Return the seconds of datatrove's four stages on the same files."""
    settings = DedupSettings()
    command = [python, "-c", DATATROVE, str(source), str(folder), str(settings.bands), str(settings.rows)]
    done = subprocess.run([*command, str(PROCESSES)], stdout=subprocess.PIPE, text=True, check=True)
    seconds = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("seconds ")]
    return {"signatures_s": round(seconds[0], 1), "end_to_end_s": round(sum(seconds), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--datatrove", help="Python of an environment with datatrove[all] 0.10.1")
    wish = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # for workers
    with tempfile.TemporaryDirectory() as name, Engine(Path(name), PROCESSES) as engine:
        folder = Path(name)

        def run_jobs(job: str, spec: dict[str, Any], items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            found = engine.run(Job(job, spec), items)
            return (result for result in found if "partial_bytes" not in result)

        (folder / "source").mkdir()
        paths, size = write_files(folder / "source", wish.megabytes)
        items = [
            {
                "source": str(path),
                **{kind: str(folder / f"{path.stem}.{kind}") for kind in ("documents", "signatures")},
            }
            for path in paths
        ]
        signing = [result["seconds"] for result in run_jobs("benchmarks.dedup:Signatures", {}, items)]
        began = time.monotonic()
        for _ in run_jobs("benchmarks.dedup:Range", {}, items):
            pass
        ranges = [RangeFiles(Path(item["documents"]), Path(item["signatures"])) for item in items]
        path = find_duplicates(folder / "dedup", ranges, DedupSettings(), run_jobs, 1 << 30, print)
        seconds = time.monotonic() - began
        with pa.ipc.open_file(path) as file:
            dropped = file.read_all().column("stage").value_counts().to_pylist()
        figures: dict[str, Any] = {
            "text": "installed Python sources and documentation, and near-duplicates of a tenth",
            "megabytes": round(size / 1e6, 1),
            "processes": PROCESSES,
            "signatures_megabytes_per_s": round(PROCESSES * size / 1e6 / sum(signing), 1),
            "end_to_end_megabytes_per_s": round(size / 1e6 / seconds, 1),
            "end_to_end_s": round(seconds, 1),
            "dropped": {entry["values"]: entry["counts"] for entry in dropped},
        }
        whole = chain(folder / "source", folder / "dataset")
        figures["chain"] = whole | {"megabytes_per_s": round(size / 1e6 / whole["seconds"], 1)}
        if wish.datatrove:
            peer_s = peer(wish.datatrove, folder / "source", folder / "datatrove")
            own_s = {"signatures": sum(signing) / PROCESSES, "end_to_end": seconds}
            ratios = {key: round(peer_s[f"{key}_s"] / own_s[key], 1) for key in own_s}
            figures["datatrove"] = peer_s | {"times_as_long": ratios}
    write_record("dedup", figures)
    ratios = figures.get("datatrove", {}).get("times_as_long", LEAST_RATIOS)
    if any(ratios[key] < least for key, least in LEAST_RATIOS.items()) or (
        figures["signatures_megabytes_per_s"] < LEAST_SIGNATURES
        or figures["end_to_end_megabytes_per_s"] < LEAST_END_TO_END
        or figures["chain"]["megabytes_per_s"] < LEAST_CHAIN
    ):
        sys.exit("error: slower than it must be")


if __name__ == "__main__":
    main()
