"""Run the tests that touch torch most under the torch of this Python; record the outcome by version.

    make test-torch TORCH=2.11.0 [ARGS="-k resume"]

Each run replaces the entry of its own version in the record and keeps the others. With ARGS, which may choose
among the tests, nothing is recorded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RECORDS, write_record
from shoal.bench.record import describe

NAME = "torch_versions"
ROOMS = ("models", "parallel", "checkpoint", "train", "strategies", "comm")
TWO_AT_A_TIME = ("-m", "not proof", "-n", "2", "--dist", "loadfile")


def outcome(junit: Path) -> dict[str, Any]:
    """Return what pytest's report says: numbers passed, failed and skipped, which failed, and why skipped."""
    failed, skips, total, seconds = [], Counter(), 0, 0.0
    for case in ET.parse(junit).getroot().iter("testcase"):
        total += 1
        seconds += float(case.get("time", 0))
        if (skip := case.find("skipped")) is not None:
            skips[skip.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "passed": total - len(failed) - sum(skips.values()),
        "failed": len(failed),
        "skipped": sum(skips.values()),
        "failures": failed,
        "skip_reasons": dict(skips),
        "test_seconds": round(seconds),
    }


def record(found: dict[str, Any], folder: Path = RECORDS) -> Path:
    """Write what was found under this torch beside what is recorded of others."""
    path = folder / f"{NAME}.json"
    versions = json.loads(path.read_text())["versions_tested"] if path.exists() else {}
    head = describe(NAME)
    versions[torch.__version__] = {"date": head["date"], "python": head["versions"]["python"], **found}
    return write_record(
        NAME, {"rooms": list(ROOMS), "versions_tested": dict(sorted(versions.items()))}, folder
    )


def main(arguments: list[str]) -> int:
    """Test, print the counts, record them; return pytest's status."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", *TWO_AT_A_TIME, f"--junitxml={junit}", *arguments]
        status = subprocess.run([*command, *(f"tests/{room}" for room in ROOMS)], check=False).returncode
        if not junit.exists():
            return status
        found = outcome(junit)
    print(
        f"torch {torch.__version__}: "
        + ", ".join(f"{found[key]} {key}" for key in ("passed", "failed", "skipped"))
    )
    if not arguments:
        record(found)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
