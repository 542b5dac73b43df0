"""Random kills of a real training run; benchmarks/kill_storm.py does more."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kill_storm import storm


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks through /proc")
@pytest.mark.proof
@pytest.mark.timeout(900)
def test_kills_lose_nothing_and_end_bit_equal(tmp_path: Path):
    record = storm(kills=10, seed=1, folder=tmp_path)
    assert record["kills"] == 10
    assert record["runs_finished_bit_equal"] >= 1
    assert record["ranks_gone_after_kill_of_a_rank_s"]["max"] < 5
