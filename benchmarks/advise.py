"""`shoal advise` against measurement: two hosts, some speeds of link, every legal strategy.

At each speed two ranks on two hosts (network namespaces: as root) advise, measuring link, step and work by
themselves; then `shoal bench gradsync` trains there by each strategy. The record has predicted and measured
seconds a step and their rank correlation (Spearman's), which is to be at least 0.8.

    python -m benchmarks.advise [--links 1gbit 200mbit 50mbit] [--steps 40]      as root, 20 minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, write_record
from shoal.bench.hosts import NAMES, TwoHosts
from shoal.config.sections import Runtime
from shoal.plan.link_cost import parse_rate
from shoal.runtime.device import choose_threads

MARK = 0.8
WORKERS, BATCH = 2, 16
PRESET, NETWORK = "tiny", "gpt"  # the same, as `advise` and `bench gradsync` call it
TEXT = ("stdlib", "--vocab-size", "2048", "--limit", "150", "--split", "90,10,0")
PORT = 29401


def advise(link: str, data: Path, settings: dict[str, Any], output: Path) -> dict[str, dict[str, Any]]:
    """Return what two ranks on two hosts predict, by strategy."""
    words = ["-m", "shoal", "advise", PRESET, "--data", str(data), "--json", str(output)]
    words += [f"--{name}={value}" for name, value in settings.items()]
    with TwoHosts(parse_rate(link)) as hosts:
        ranks = []
        for node, name in enumerate(NAMES):
            meet = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", hosts.rdzv.split(":")[0]]
            torchrun = ["-m", "torch.distributed.run", *meet, "--master-port", str(PORT), *words]
            ranks.append(hosts.start(name, [sys.executable, *torchrun]))
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
        assert not any(rank.returncode for rank in ranks), said
    print(said[0], flush=True)
    return {row["strategy"]: row for row in json.loads(output.read_text())["rows"] if not row["refused"]}


def measure(link: str, data: Path, steps: int, runs: Path, output: Path) -> dict[str, float]:
    """Return the seconds a step that trainings took, by strategy."""
    words = ["bench", "gradsync", "--networks", NETWORK, "--workers", str(WORKERS), "--link", link]
    words += ["--steps", str(steps), "--global-batch-size", str(BATCH), "--data", str(data)]
    words += ["--runs", str(runs), "--output", str(output)]
    subprocess.run([sys.executable, "-m", "shoal", *words], check=False)  # 1: some training failed
    cells = json.loads(output.read_text())["cells"]
    return {cell["strategy"]: cell["seconds_a_step"] for cell in cells if cell["status"] == "done"}


def ranks(values: Sequence[float]) -> list[float]:
    """Return each value's place among all, from 1; equal ones share the mean of theirs."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the correlation of ranks: 1 where both put everything in the same order."""
    return statistics.correlation(ranks(ours), ranks(theirs))


def compare(link: str, data: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Predict and measure at one speed; settings are those that `bench gradsync` takes for so many steps."""
    every = max(1, min(100, steps // 4))
    settings = {
        "train.global_batch_size": BATCH,
        "train.micro_batch_size": BATCH // WORKERS,
        "train.steps": steps,
        "runtime.threads": choose_threads(Runtime(), WORKERS)[0],  # two hosts share this one
        "sync.every": every,
        "sync.fragments": min(2, every),
        "sync.overlap": max(0, min(5, every // 2 - 1)),
    }
    predicted = advise(link, data, settings, folder / f"advice-{link}.json")
    measured = measure(link, data, steps, folder / link, folder / f"cells-{link}.json")
    both = sorted(predicted.keys() & measured.keys(), key=lambda name: measured[name])
    pairs = [{"strategy": name, "predicted": predicted[name], "measured_s": measured[name]} for name in both]
    correlation = spearman([predicted[name]["step_s"] for name in both], [measured[name] for name in both])
    for name in both:
        print(f"{link} {name:17} predicted {predicted[name]['step_s']:.4f} s, took {measured[name]:.4f} s")
    print(f"{link}: rank correlation {correlation:.3f} of {len(both)} strategies", flush=True)
    return {"link": link, "rank_correlation": round(correlation, 3), "strategies": pairs}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", default=["1gbit", "200mbit", "50mbit"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=RECORDS, help="folder of the record")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = folder / "data"
        words = [sys.executable, "-m", "shoal", "prepare", *TEXT, "--output", str(data)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        found = [compare(link, data, wish.steps, folder) for link in wish.links]
    write_record("advise", {"network": NETWORK, "workers": WORKERS, "links": found}, wish.output)
    return int(any(one["rank_correlation"] < MARK for one in found))


if __name__ == "__main__":
    sys.exit(main())
