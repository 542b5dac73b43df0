"""What verification finds, and what a path given by the user stands for."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from pathlib import Path

import pytest

from shoal.checkpoint.manifest import (
    MANIFEST,
    is_file_name,
    read_decoder,
    read_manifest,
    resolve_checkpoint,
    verify,
)
from shoal.config.load import to_toml, validate
from shoal.errors import CheckpointError, InputError
from tests.checkpoint.damage import cut_short, edit_manifest, entries, files_of, flip_bit, forge_manifest


@pytest.fixture
def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000020"


def test_good_checkpoint_has_no_problems(newest: Path):
    assert verify(newest) == []
    names = {str(path.relative_to(newest)) for path in files_of(newest)}
    assert names == {*entries(newest), MANIFEST}
    assert {"state.json", "config.toml"} < names


def test_a_flipped_bit_in_any_file_is_found_and_the_file_named(newest: Path):
    positions = random.Random(0)
    for path in files_of(newest):
        content = path.read_bytes()
        for _ in range(20):
            flip_bit(path, positions.randrange(8 * len(content)))
            problems = verify(newest)
            damaged_meaning = path.name != MANIFEST or _differs(newest, content)
            assert bool(problems) == damaged_meaning
            assert all(path.name in problem for problem in problems)
            path.write_bytes(content)
    assert verify(newest) == []


def _differs(checkpoint: Path, content: bytes) -> bool:
    """Say whether a damaged manifest means something else; one blank for another does not."""
    now = (checkpoint / MANIFEST).read_bytes()
    return now.split() != content.split()


def test_cut_short_missing_and_extra_files_are_named(newest: Path):
    tensors = next(path for path in files_of(newest) if path.suffix == ".safetensors")
    cut_short(tensors)
    (newest / "state.json").unlink()
    (newest / "model" / "more.safetensors").write_bytes(b"")
    (newest / "notes.txt").write_text("mine")
    found = "\n".join(verify(newest))
    assert f"{tensors.name} has" in found
    assert "state.json is missing" in found
    assert "'model/more.safetensors' is not in the manifest" in found
    assert "'notes.txt' is not in the manifest" in found


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a manifest of the format"),
        (b"\x80\x04rubbish", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"format": "shoal-checkpoint-1"}', "damaged or edited"),
    ],
)
def test_rubbish_manifest_is_a_sentence(newest: Path, content: bytes, sentence: str):
    (newest / MANIFEST).write_bytes(content)
    assert sentence in verify(newest)[0]


def test_edited_manifest_is_found(newest: Path):
    edit_manifest(newest, world_size=3)
    assert "digest does not fit" in verify(newest)[0]


def test_folder_name_and_manifest_must_name_the_same_step(run: Path):
    renamed = (run / "checkpoints" / "step-00000020").rename(run / "checkpoints" / "step-00000090")
    assert "step-00000090 but its manifest says step 20" in verify(renamed)[0]


@pytest.mark.parametrize(
    "name", ["../escape", "/etc/passwd", "a/b/c", ".hidden", "model/../x", "", "a\nb", "a\\b/c/"]
)
def test_names_that_lead_elsewhere_are_refused(newest: Path, name: str):
    assert not is_file_name(name)
    forge_manifest(newest, files={name: {"size_bytes": 0, "xxh3_128": ""}})
    assert "in a way that Shoal never writes" in verify(newest)[0]
    with pytest.raises(CheckpointError, match="never writes"):
        read_manifest(newest)


def test_links_and_pipes_are_no_files(newest: Path):
    (newest / "state.json").unlink()
    os.mkfifo(newest / "state.json")
    (newest / "config.toml").unlink()
    (newest / "config.toml").symlink_to("/etc/passwd")
    shutil.move(newest / "model", newest.parent / "elsewhere")
    (newest / "model").symlink_to(newest.parent / "elsewhere")
    found = "\n".join(verify(newest))
    assert "state.json is missing or not an ordinary file" in found
    assert "config.toml is missing or not an ordinary file" in found
    assert "model/" in found


def test_tensor_file_that_is_none_is_found_even_if_its_digest_fits(newest: Path):
    tensors = next(path for path in files_of(newest) if path.suffix == ".safetensors")
    tensors.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    forge_manifest(newest)
    assert f"{tensors.name} is not a safetensors file" in "\n".join(verify(newest))


def test_run_folder_checkpoints_folder_and_checkpoint_are_understood(run: Path, newest: Path):
    older = newest.with_name("step-00000010")
    assert resolve_checkpoint(run) == resolve_checkpoint(run / "checkpoints") == newest
    assert resolve_checkpoint(older) == older
    cut_short(newest / "state.json")
    assert resolve_checkpoint(run) == older
    assert newest.exists(), "reading renames nothing"


def test_a_path_without_a_good_checkpoint_is_a_sentence(run: Path, newest: Path, tmp_path: Path):
    with pytest.raises(InputError, match="is not a folder"):
        resolve_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no folder step-"):
        resolve_checkpoint(tmp_path)
    cut_short(newest / "state.json")
    with pytest.raises(CheckpointError, match=r"is damaged: state.json has"):
        resolve_checkpoint(newest)
    (newest.with_name("step-00000010") / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"step-00000020 is damaged.*step-00000010 is damaged"):
        resolve_checkpoint(run)


@pytest.mark.parametrize("eod_id", [None, "", [], "inf", math.inf])
def test_a_state_that_does_not_tell_the_end_of_a_document_is_a_sentence(tmp_path: Path, eod_id: object):
    (tmp_path / "config.toml").write_text(to_toml(validate({"train": {"steps": 1}}, "test")))
    (tmp_path / "state.json").write_text(json.dumps({"vocab_size": 257, "eod_id": eod_id}))
    with pytest.raises(CheckpointError, match=r"the state of checkpoint .* has a missing or invalid entry:"):
        read_decoder(tmp_path)
