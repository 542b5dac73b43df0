"""SIGKILL before every single change that a save makes to the disk: the newest good step is always chosen."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from shoal.checkpoint.manifest import committed, step_of, verify
from tests.checkpoint.crash import run_and_kill
from tests.checkpoint.ranks import load_latest, save_steps
from tests.checkpoint.retention import ONLY_LAST, THINNED
from tests.pool import Pool

ALL_MOMENTS = ((1, 0, 1, ONLY_LAST), (1, 0, 1, THINNED), (2, 0, 1, ONLY_LAST), (2, 1, 1, ONLY_LAST))


@pytest.mark.parametrize(
    ("world_size", "victim", "stride", "retention"),
    [
        (1, 0, 8, ONLY_LAST),
        (1, 0, 6, THINNED),
        (2, 0, 12, ONLY_LAST),
        (2, 1, 8, ONLY_LAST),
        *(pytest.param(*case, marks=pytest.mark.proof) for case in ALL_MOMENTS),
    ],
    ids=lambda value: "thinned" if value is THINNED else "last" if value is ONLY_LAST else None,
)
def test_newest_good_step_survives_a_kill_at_any_moment(
    pool: Pool, tmp_path: Path, world_size: int, victim: int, stride: int, retention: dict
):
    origin = tmp_path / "origin"
    pool.run(save_steps, world_size, origin, [1, 2])
    chosen = []
    for event in range(1, 400, stride):
        folder = tmp_path / f"killed-{event}" / "checkpoints"
        shutil.copytree(origin, folder)
        codes = run_and_kill(folder, world_size, victim, event, retention)
        assert codes[victim] in (0, -signal.SIGKILL)
        committed_before = {step_of(path) for path in committed(folder)}
        chosen.append(pool.run(load_latest, 1, folder)[0])
        assert chosen[-1] == max(committed_before)
        assert (folder / "LATEST").read_text() == f"{chosen[-1]}\n"
        assert {path.name for path in folder.iterdir()} == {
            "LATEST",
            *(path.name for path in committed(folder)),
        }
        assert all(not verify(path) for path in committed(folder))
        if codes[victim] == 0:
            break
    assert chosen[0] == 2
    assert chosen[-1] == 3
    assert chosen == sorted(chosen)
    assert codes[victim] == 0
    print(f"{len(chosen)} kills, step 3 from number {chosen.index(3) + 1} on")
