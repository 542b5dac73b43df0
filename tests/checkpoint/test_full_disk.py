"""A disk that fills up during training."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shoal.checkpoint.manifest import resolve_checkpoint
from tests import commands
from tests.tiny_dataset import random_dataset

OPTIONS = [
    "--model.n-layers=1",
    "--model.d-model=32",
    "--train.steps=20",
    "--checkpoint.every=2",
    "--runtime.threads=1",
]


def test_training_stops_with_a_sentence_and_goes_on_once_there_is_room(small_disk: Path, tmp_path: Path):
    data = random_dataset(tmp_path / "data")
    run = small_disk / "run"
    words = ["train", "tiny", f"--data={data}", f"--run-dir={run}", *OPTIONS]
    full = commands.run(*words, timeout=200)
    assert full.returncode == 1
    assert "the disk is full: cannot write" in full.stderr
    assert "free some space" in full.stderr
    kept = resolve_checkpoint(run).name
    subprocess.run(["mount", "-o", "remount,size=8M", str(small_disk)], check=True)
    again = commands.run(*words, timeout=200)
    assert again.returncode == 0, again.stderr
    assert f"resumed from {kept}" in again.stdout
    assert resolve_checkpoint(run).name == "step-00000020"


def test_models_that_do_not_fit_go_neither_in_nor_out(small_disk: Path, tmp_path: Path):
    data, run = random_dataset(tmp_path / "data"), tmp_path / "run"
    wide = ["--model.n-layers=2", "--model.d-model=512", "--model.n-heads=4", "--train.steps=1"]
    trained = commands.run("train", "tiny", f"--data={data}", f"--run-dir={run}", *wide, timeout=200)
    assert trained.returncode == 0, trained.stderr
    out = commands.run("export", run, tmp_path / "out", "--no-prove")
    assert out.returncode == 0, out.stderr
    for words in (
        ["export", run, small_disk / "out", "--no-prove"],
        ["import", tmp_path / "out", small_disk / "in"],
    ):
        full = commands.run(*words)
        assert full.returncode == 1
        assert "the disk is full: cannot write" in full.stderr
        assert list(small_disk.iterdir()) == []
