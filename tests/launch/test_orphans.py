"""Workers whose launcher is killed before they have even joined each other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cases import every
from tests.launch.processes import alive, children
from tests.tiny_dataset import random_dataset


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the workers through /proc")
@pytest.mark.parametrize(
    "born", every(2, [3, 1])
)  # the server that ranks are forked from, with two ranks; alone
def test_workers_end_when_their_launcher_dies_while_they_start(tmp_path: Path, born: int):
    data = random_dataset(tmp_path / "data")
    words = ["train", "tiny", "--nproc=2", f"--data={data}", f"--run-dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "shoal", *words]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(workers := children(launcher.pid)) < born and time.monotonic() < deadline:
        time.sleep(0.01)
    launcher.kill()
    launcher.wait()
    assert len(workers) == born
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in workers if alive(pid)]
    for pid in left:
        os.kill(pid, 9)
    assert not left, "orphans wait for a store that is gone"
