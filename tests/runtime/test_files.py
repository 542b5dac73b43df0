"""Files are whole or absent, and what stands in the way is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import InputError
from shoal.runtime.files import alone_in, atomic_write, write_json
from tests import commands
from tests.tiny_dataset import random_dataset


def test_file_where_a_folder_is_needed_is_a_sentence(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(InputError, match=r"taken/out\.json cannot be written"):
        write_json(tmp_path / "taken" / "out.json", {})
    assert (tmp_path / "taken").read_text() == "mine"


def test_folder_where_a_file_is_needed_is_a_sentence(tmp_path):
    with pytest.raises(InputError, match="cannot be written: Is a directory"):
        write_json(tmp_path, {})


def test_folder_that_cannot_be_made_is_a_sentence():
    with pytest.raises(InputError, match="cannot be written"):
        write_json(Path("/proc/nowhere/out.json"), {})


def test_failed_block_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})

    def fail_half_way():
        with atomic_write(path) as file:
            file.write(b"half")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail_half_way()
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert '"step": 1' in path.read_text()


def test_folder_has_one_holder_at_a_time(tmp_path):
    with alone_in(tmp_path / "run"):
        with pytest.raises(InputError, match="another process is at work in"), alone_in(tmp_path / "run"):
            pass
        with alone_in(tmp_path / "other"):
            pass
    with alone_in(tmp_path / "run"):
        pass


def test_folder_is_free_again_after_its_holder_was_killed(tmp_path):
    script = "import sys, time; from pathlib import Path; from shoal.runtime.files import alone_in\n"
    script += "with alone_in(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError), alone_in(tmp_path):
            pass
        holder.kill()
    with alone_in(tmp_path):
        pass


def test_second_training_in_a_run_folder_is_refused(tmp_path):
    data = random_dataset(tmp_path / "data")
    with alone_in(tmp_path / "run"):
        done = commands.run("train", "tiny", "--data", data, "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert "another process is at work in" in done.stderr
    assert list((tmp_path / "run").iterdir()) == []
