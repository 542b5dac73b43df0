"""A disk that fills up during training."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shoal.checkpoint.manifest import resolve_checkpoint
from shoal.errors import ShoalError
from shoal.interop.export import export
from shoal.interop.importing import Wanted
from shoal.interop.importing import run as import_model
from tests import commands
from tests.models.hf import random_gpt2
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
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    random_gpt2(n_embd=512, n_head=4).save_pretrained(theirs)
    import_model(theirs, ours, Wanted())
    full = pytest.raises(ShoalError, match="the disk is full: cannot write")
    with full:
        import_model(theirs, small_disk / "in", Wanted())
    assert list(small_disk.iterdir()) == []
    with full:
        export(ours, small_disk / "out")
    assert list(small_disk.iterdir()) == []
