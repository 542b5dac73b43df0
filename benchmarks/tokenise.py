"""From a text file to a committed dataset with a BPE of 32,000 ids: MB/s and peak memory of `shoal prepare`.

The text is the Python source of everything installed beside this interpreter, repeated up to the size asked
for. The BPE is trained on a part of it first, which is timed apart. The peer is the tokenizers library with
the same tokenizer, encoding the same text in batches of documents on as many threads.

    python -m benchmarks.tokenise [--megabytes 1000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import write_record

SEPARATOR = "\n\x1e\n"  # between documents
TRAINED_MB = 50
PEER_MB = 60
LEAST_MB_PER_S, MOST_BYTES = 10.0, 2 << 30
POLL_S = 0.05


def documents() -> Iterator[str]:
    """Yield the installed source files without end."""
    paths = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    for path in itertools.cycle(paths):
        text = path.read_text(errors="replace").replace("\x1e", " ")
        if len(text) > 100:
            yield text


def write_text(path: Path, megabytes: int) -> None:
    """Write about so many million bytes of documents."""
    with path.open("w") as out:
        for text in documents():
            out.write(text + SEPARATOR)
            if out.tell() > megabytes * 1e6:
                return


def prepare(text: Path, output: Path, *options: str) -> dict[str, Any]:
    """Run `shoal prepare`; return its seconds and the most anonymous memory its processes had together."""
    command = [sys.executable, "-m", "shoal", "prepare", str(text), "--output", str(output), *options]
    began = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    peaks, done = Counter[str](), threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, output, peaks, done))
    watcher.start()
    status = process.wait()
    seconds = time.monotonic() - began
    done.set()
    watcher.join()
    if status:
        sys.exit(f"error: shoal prepare ended with {status}")
    megabytes = text.stat().st_size / 1e6
    return {
        "seconds": round(seconds, 1),
        "megabytes_per_s": round(megabytes / seconds, 2),
        "peak_bytes": max(peaks.values()),
        "peak_bytes_of": dict(peaks),
    }


def _watch(pid: int, output: Path, peaks: Counter[str], done: threading.Event) -> None:
    """Note the most anonymous memory before the first file of tokens is there, and after."""
    while not done.wait(POLL_S):
        step = "tokenise" if any(output.glob(".work/*/ranges/*")) else "before"
        peaks[step] = max(peaks[step], sum(_anonymous_bytes(one) for one in _family(pid)))


def _family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    family = [pid]
    for one in family:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                family += map(int, children.read_text().split())
            except OSError:  # it has just ended
                continue
    return family


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def peer(tokenizer: Path, megabytes: int) -> float:
    """Return the MB/s of the tokenizers library, which brings its own threads."""
    from tokenizers import Tokenizer

    encoder, texts, size = Tokenizer.from_file(str(tokenizer)), [], 0
    for text in documents():
        texts.append(text)
        size += len(text.encode())
        if size > megabytes * 1e6:
            break
    began = time.monotonic()
    for first in range(0, len(texts), 1000):
        encoder.encode_batch_fast(texts[first : first + 1000])
    return round(size / 1e6 / (time.monotonic() - began), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    wish = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "part.txt", TRAINED_MB)
        write_text(folder / "text.txt", wish.megabytes)
        cut = ("--separator", SEPARATOR)
        trained = prepare(folder / "part.txt", folder / "trained", *cut, "--vocab-size", "32000")
        samples, peers = [], []
        for repeat in range(wish.repeats):
            output = folder / f"data{repeat}"
            samples.append(prepare(folder / "text.txt", output, *cut, "--tokenizer", str(folder / "trained")))
            peers.append(peer(folder / "trained/tokenizer.json", PEER_MB))
            print(json.dumps(samples[-1]), f"tokenizers: {peers[-1]} MB/s", flush=True)
    rate = statistics.median(sample["megabytes_per_s"] for sample in samples)
    figures = {
        "text": "the installed Python sources, repeated",
        "megabytes": wish.megabytes,
        "median_megabytes_per_s": rate,
        "ratio_to_tokenizers": round(rate / statistics.median(peers), 2),
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
        "samples": samples,
        "tokenizers_megabytes_per_s": peers,
        f"training_of_the_bpe_on_{TRAINED_MB}_megabytes": trained,
    }
    write_record("tokenise", figures)
    if rate < LEAST_MB_PER_S or figures["peak_bytes"] > MOST_BYTES:
        sys.exit(f"error: {rate} MB/s with {figures['peak_bytes'] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
