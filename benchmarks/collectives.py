"""All-reduce by each algorithm beside gloo's own, on 2 and 4 processes, several times over; then by size.

python -m benchmarks.collectives [--repeats 5] [--size 64MB] [--sweep 1KB 256MB]
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


def measure(ranks: int, least: str, most: str) -> dict[str, Any]:
    """Run `shoal bench collectives` once; return its table and the links that it fitted."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        words = ["bench", "collectives", "--nproc", str(ranks), "--sizes", least, most, "--json", str(output)]
        subprocess.run([sys.executable, "-m", "shoal", *words], check=True, stdout=subprocess.DEVNULL)
        found = json.loads(output.read_text())
    assert not any(row["wrong"] for row in found["rows"]), found
    return {key: found[key] for key in ("links", "rows")}


def compare(ranks: int, size: str, repeats: int) -> dict[str, Any]:
    """Return the samples of each algorithm, and how fast it is as a part of the back end's own."""
    tables = [measure(ranks, size, size)["rows"] for _ in range(repeats)]
    runs = [{row["algorithm"]: row["time_s"] for row in rows} for rows in tables]
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
    parser.add_argument("--sweep", nargs=2, default=["1KB", "256MB"], help="least and most bytes, at the end")
    parser.add_argument("--output", type=Path, default=RECORDS / "collectives.json")
    wish = parser.parse_args()
    results = {str(ranks): compare(ranks, wish.size, wish.repeats) for ranks in (2, 4)}
    sweep = {str(ranks): measure(ranks, *wish.sweep) for ranks in (2, 4)}
    figures = {"size": wish.size, "ranks": results, "sweep": sweep}
    write_record(wish.output.stem, figures, wish.output.parent)
    best = [
        max(entry["speed_of_backend"][name] for name in ("chunked_ring", "halving_doubling"))
        for entry in results.values()
    ]
    sys.exit(int(min(best) < FLOOR))


if __name__ == "__main__":
    main()
