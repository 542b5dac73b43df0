"""The time of a step beside another commit's."""

import pytest

from benchmarks import commits
from tests.tiny_dataset import random_dataset

FEW = commits.TINY | {"nproc": 1, "train.steps": 40}


@pytest.mark.proof
def test_both_codes_are_run_by_turns():
    found = commits.compare({"few": FEW}, "HEAD", repeats=1)["few"]
    [this], [other] = found["step_ms"]["this"], found["step_ms"]["other"]
    assert found["ratio"] == pytest.approx(this / other, abs=1e-3)


@pytest.mark.proof
def test_it_is_the_code_of_the_other_commit_that_runs(tmp_path):
    commits.unpack("HEAD", tmp_path)
    (tmp_path / "src/shoal/train/loop.py").write_text("raise RuntimeError('the other code')")
    with pytest.raises(AssertionError, match="the other code"):
        commits.step_ms(tmp_path, random_dataset(tmp_path / "data"), tmp_path / "run", FEW)
