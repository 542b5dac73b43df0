"""A run to generate from, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import commands
from tests.tiny_dataset import random_dataset


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory) -> Path:
    """Train four steps of `tiny` with two checkpoints, as a user would."""
    folder = tmp_path_factory.mktemp("generate")
    data = random_dataset(folder / "data")
    settings = ["--train.steps", "4", "--checkpoint.every", "2"]
    done = commands.run("train", "tiny", "--data", data, "--run-dir", folder / "run", *settings)
    assert done.returncode == 0, done.stderr
    return folder / "run"
