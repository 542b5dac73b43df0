"""Files are whole or absent, and what stands in the way is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import InputError
from shoal.runtime.files import atomic_write, write_json


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
