"""Saving and loading on one and several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.ranks import load_latest, save_steps
from tests.pool import Pool


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_what_was_saved_is_loaded_on_another_number_of_ranks(
    pool: Pool, tmp_path: Path, saved_on, loaded_on, cut
):
    pool.run(save_steps, saved_on, tmp_path, [3, 12], cut)
    assert pool.run(load_latest, loaded_on, tmp_path, cut, 0) == [12] * loaded_on
    assert pool.run(load_latest, loaded_on, tmp_path, cut, -1) == [12] * loaded_on
    assert pool.run(load_latest, loaded_on, tmp_path, not cut) == [12] * loaded_on
    assert (tmp_path / "LATEST").read_text() == "12\n"
