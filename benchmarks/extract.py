"""Extraction of web pages: pages/s of the stage against trafilatura called directly, and F1 of both.

Each of 2 worker processes takes a half of the pages, again and again. The peer is trafilatura in a
`multiprocessing.Pool` of 2 processes, called on the bytes of the same files. Both are warm before the clock
starts, and take turns. FOLDER holds `pages/*.html` and `gold.json`: {page: {"with": [...], "without":
[...]}}, snippets that the text must and must not contain.

    python -m benchmarks.extract FOLDER [--rounds 5] [--repeats 4]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import write_record
from shoal.data.prepare.parse import Format
from shoal.data.prepare.read import document_batches
from shoal.data.prepare.sources import Segment, SourceFile, WorkRange
from shoal.data.prepare.stages.documents import Stage
from shoal.data.prepare.stages.extract import Extract

WORKERS = 2
LEAST_RATIO = 0.9
_STAGE: list[Stage] = []  # of this worker process


def with_shoal(paths: list[str]) -> dict[str, str]:
    """Read pages and extract them, as a worker of `shoal prepare` does."""
    if not _STAGE:
        _STAGE.append(Extract().start())
    files = {
        n: SourceFile(path, "main", "html", Path(path).stat().st_size, 0) for n, path in enumerate(paths)
    }
    work = WorkRange(0, "main", 1, tuple(Segment(n, 0, file.size) for n, file in files.items()))
    rows = [
        row
        for batch in document_batches(work, files, Format("text", None, None, None))
        for row in _STAGE[0](batch).select(["file", "text"]).to_pylist()
    ]
    return {Path(paths[row["file"]]).name: row["text"] or "" for row in rows}


def with_trafilatura(paths: list[str]) -> dict[str, str]:
    """Call trafilatura with its default settings."""
    import trafilatura

    return {Path(path).name: trafilatura.extract(Path(path).read_bytes()) or "" for path in paths}


def scores(texts: dict[str, str], gold: dict[str, Any]) -> dict[str, float]:
    """Return precision, recall and F1 of the snippets."""
    right = sum(snippet in texts[name] for name, facts in gold.items() for snippet in facts["with"])
    wrong = sum(snippet in texts[name] for name, facts in gold.items() for snippet in facts["without"])
    precision, recall = right / (right + wrong), right / sum(len(facts["with"]) for facts in gold.values())
    f1 = 2 * precision * recall / (precision + recall)
    return {name: round(value, 4) for name, value in zip("PRF", (precision, recall, f1), strict=True)}


def pages_per_s(pool: Any, work: Callable[[list[str]], Any], paths: list[str], repeats: int) -> float:
    """Return the rate of both workers together: each has its own half of the pages."""
    halves = [paths[n::WORKERS] * repeats for n in range(WORKERS)]
    began = time.monotonic()
    pool.map(work, halves, chunksize=1)
    return round(sum(map(len, halves)) / (time.monotonic() - began), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=4)
    wish = parser.parse_args()
    gold = json.loads((wish.folder / "gold.json").read_text())
    paths = [str(wish.folder / "pages" / name) for name in sorted(gold)]
    runs = {"shoal": with_shoal, "trafilatura": with_trafilatura}
    context = multiprocessing.get_context("spawn")
    pools = {name: context.Pool(WORKERS) for name in runs}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(wish.rounds + 1):
        for name, work in runs.items():
            rate = pages_per_s(pools[name], work, paths, wish.repeats)
            if number:  # the first round loads libraries and fills caches
                rates[name].append(rate)
                print(f"{name}: {rate} pages/s", flush=True)
    found = {name: scores(pools[name].apply(work, (paths,)), gold) for name, work in runs.items()}
    for pool in pools.values():
        pool.close()
        pool.join()
    ratio = round(statistics.median(rates["shoal"]) / statistics.median(rates["trafilatura"]), 3)
    figures = {
        "pages": len(paths),
        "repeats": wish.repeats,
        "pages_per_s": rates,
        "ratio": ratio,
        "snippets": found,
    }
    write_record("extract", figures)
    if ratio < LEAST_RATIO or found["shoal"]["F"] < found["trafilatura"]["F"]:
        sys.exit(f"error: {ratio} of trafilatura's pages/s, F1 {found['shoal']['F']}")


if __name__ == "__main__":
    main()
