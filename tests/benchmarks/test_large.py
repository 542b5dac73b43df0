"""The measurements of large models run, with few layers; `--layers` as it is writes the record."""

import subprocess
import sys

import pytest


@pytest.mark.proof
@pytest.mark.parametrize("name", ["reshard_large", "interop"])
def test_memory_stays_within_the_limit(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--layers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
