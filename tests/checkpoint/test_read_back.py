"""A file that is damaged before it is read back: nothing old may go, and nothing may point to it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from unittest import mock

import pytest

from shoal.checkpoint.manifest import verify
from shoal.errors import CheckpointError
from tests.cases import every
from tests.checkpoint.damage import cut_short, flip_bit
from tests.checkpoint.ranks import full_tensors, load_latest, open_store
from tests.pool import Pool

FILES = ("model/shard-00001-*", "optimizer/shard-00002-*", "state.json", "config.toml", "manifest.json")
DAMAGES = {"flip": lambda path: flip_bit(path, 77), "cut": cut_short, "lose": Path.unlink}


def save_while_a_disk_fails(folder: Path, pattern: str, damage: str) -> str:
    """Save step 10, then step 20, of which a file goes bad once it has its name; return what is said."""
    store = open_store(folder, keep_last=1)
    store.save(10, full_tensors(10), {"step": 10}, {"config.toml": b"seed = 1\n"})
    store.wait()

    def failing(honest):
        def move(source, target, *args, **named):
            honest(source, target, *args, **named)
            if Path(target).name == "step-00000020":
                (file,) = Path(target).glob(pattern)
                DAMAGES[damage](file)

        return move

    with mock.patch("os.rename", failing(os.rename)), mock.patch("os.replace", failing(os.replace)):
        store.save(20, full_tensors(20), {"step": 20}, {"config.toml": b"seed = 1\n"})
        try:
            store.wait()
        except CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("pattern", "damage"), every(2, itertools.product(FILES, DAMAGES)))
def test_what_reads_back_damaged_is_no_checkpoint(pool: Pool, tmp_path: Path, pattern: str, damage: str):
    folder = tmp_path / "checkpoints"
    for said in pool.run(save_while_a_disk_fails, 2, folder, pattern, damage):
        assert "what was just written reads back damaged" in said
        assert pattern.removesuffix("-*") in said
        assert "check the disk" in said
    assert (folder / "LATEST").read_text() == "10\n"
    assert {path.name for path in folder.iterdir()} == {"LATEST", "step-00000010", "bad-step-00000020"}
    assert verify(folder / "step-00000010") == []
    assert pool.run(load_latest, 2, folder) == [10, 10]
