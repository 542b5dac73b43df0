"""A run with two good checkpoints, copied for each test that damages it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.ranks import save_steps
from tests.pool import Pool


@pytest.fixture(scope="session")
def pristine(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoints folder with steps 10 and 20, written by two ranks."""
    folder = tmp_path_factory.mktemp("pristine") / "checkpoints"
    pool.run(save_steps, 2, folder, [10, 20])
    return folder


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    """A run folder of one's own with these checkpoints."""
    shutil.copytree(pristine, tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount the small disk that this needs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
