"""All-reduce by each algorithm beside gloo's own, on 2 and 4 processes, several times over.

python -m benchmarks.collectives [--repeats 5] [--size 64MB]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, write_record

FLOOR = 0.9  # of the back end's own speed, by the ring in chunks or by halving and doubling


def measure(ranks: int, size: str) -> dict[str, float]:
    """Run `shoal bench collectives` once; return the seconds of each algorithm."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        words = ["bench", "collectives", "--nproc", str(ranks), "--sizes", size, size, "--json", str(output)]
        subprocess.run([sys.executable, "-m", "shoal", *words], check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(output.read_text())["rows"]
    assert not any(row["wrong"] for row in rows), rows
    return {row["algorithm"]: row["time_s"] for row in rows}


def compare(ranks: int, size: str, repeats: int) -> dict[str, Any]:
    """Return the samples of each algorithm, and how fast it is as a part of the back end's own."""
    runs = [measure(ranks, size) for _ in range(repeats)]
    samples = {name: [run[name] for run in runs] for name in runs[0]}
    ratios = {
        name: round(statistics.median(run["backend"] / run[name] for run in runs), 3) for name in runs[0]
    }
    print(f"{ranks} ranks: {ratios}", flush=True)
    return {"seconds": samples, "speed_of_backend": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--size", default="64MB")
    parser.add_argument("--output", type=Path, default=RECORDS / "collectives.json")
    wish = parser.parse_args()
    results = {str(ranks): compare(ranks, wish.size, wish.repeats) for ranks in (2, 4)}
    write_record(wish.output.stem, {"size": wish.size, "ranks": results}, wish.output.parent)
    best = [
        max(entry["speed_of_backend"][name] for name in ("chunked_ring", "halving_doubling"))
        for entry in results.values()
    ]
    sys.exit(int(min(best) < FLOOR))


if __name__ == "__main__":
    main()
