"""The record of all-reduce beside the back end's own, on a size that takes no time."""

import json
import subprocess
import sys

import pytest


@pytest.mark.proof
def test_the_record_has_every_algorithm_on_two_and_four_processes(tmp_path):
    output = tmp_path / "record.json"
    words = ["-m", "benchmarks.collectives", "--repeats", "1", "--size", "64KB", "--sweep", "1KB", "4MB"]
    words += ["--output", output]
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode in (0, 1), (
        done.stderr
    )  # 1: slower than the back end, which so short a tensor may be
    for entry in json.loads(output.read_text())["ranks"].values():
        assert {"ring", "chunked_ring", "tree", "halving_doubling", "backend"} == set(entry["seconds"])
        assert entry["speed_of_backend"]["backend"] == 1
    for entry in json.loads(output.read_text())["sweep"].values():
        assert [row["size"] for row in entry["rows"] if row["algorithm"] == "tree"][:3] == [1024, 4096, 16384]
        assert entry["links"]["tree"]["bytes_per_s"] > 0  # 4 MB take longer than 1 KB, whatever else runs
    fast = [
        max(entry["speed_of_backend"][name] for name in ("chunked_ring", "halving_doubling")) >= 0.9
        for entry in json.loads(output.read_text())["ranks"].values()
    ]
    assert done.returncode == int(not all(fast))
