"""`shoal checkpoint ls | verify | rm`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.checkpoint import list_checkpoints, remove_checkpoint, verify_checkpoints
from shoal.errors import InputError
from tests import commands
from tests.checkpoint.damage import cut_short


def test_ls_tells_step_size_loss_and_damage_and_writes_json(run: Path, tmp_path: Path, capsys):
    cut_short(run / "checkpoints" / "step-00000010" / "state.json")
    (run / "checkpoints" / "bad-step-00000007").mkdir()
    assert list_checkpoints(run, tmp_path / "list.json") == 0
    shown = capsys.readouterr().out
    assert "step-00000020" in shown
    assert "2.0000" in shown
    assert "bad-step-00000007" in shown
    found = json.loads((tmp_path / "list.json").read_text())
    newest, older = found["checkpoints"]
    assert (newest["step"], newest["loss"], newest["problems"]) == (20, 2.0, [])
    assert newest["size_bytes"] > 0
    assert "state.json has" in older["problems"][0]
    assert found["set_aside"] == ["bad-step-00000007"]


def test_verify_exits_with_1_where_anything_is_damaged(run: Path, capsys):
    assert verify_checkpoints(run) == 0
    cut_short(run / "checkpoints" / "step-00000010" / "state.json")
    assert verify_checkpoints(run / "checkpoints") == 1
    assert "step-00000020: good\nstep-00000010: state.json has" in capsys.readouterr().out
    assert verify_checkpoints(run / "checkpoints" / "step-00000020") == 0


def test_rm_removes_one_and_protects_the_newest_good_one(run: Path):
    folder = run / "checkpoints"
    with pytest.raises(InputError, match="newest good checkpoint"):
        remove_checkpoint(folder / "step-00000020")
    assert remove_checkpoint(folder / "step-00000010") == 0
    assert remove_checkpoint(folder / "step-00000020", force=True) == 0
    assert list(folder.iterdir()) == []


def test_rm_of_the_newest_points_latest_at_the_one_before(run: Path):
    folder = run / "checkpoints"
    remove_checkpoint(folder / "step-00000020", force=True)
    assert (folder / "LATEST").read_text() == "10\n"


def test_a_damaged_newest_one_does_not_count_as_good(run: Path):
    folder = run / "checkpoints"
    cut_short(folder / "step-00000020" / "state.json")
    with pytest.raises(InputError, match="step-00000010 is the newest good checkpoint"):
        remove_checkpoint(folder / "step-00000010")
    assert remove_checkpoint(folder / "step-00000020") == 0


@pytest.mark.parametrize(
    "given", ["", "checkpoints", "checkpoints/step-00000099", "checkpoints/step-1/../..", "/"]
)
def test_rm_refuses_what_is_no_checkpoint(run: Path, given: str):
    with pytest.raises(InputError, match="is not a checkpoint folder"):
        remove_checkpoint(run / given)
    assert len(list((run / "checkpoints").glob("step-*"))) == 2


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_folder_without_checkpoints_is_a_sentence(tmp_path: Path, command: str):
    result = commands.run("checkpoint", command, tmp_path)
    assert result.returncode == 2
    assert "holds no checkpoint" in result.stderr


def test_the_commands_do_without_torch():
    code = "import sys, shoal.cli.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
