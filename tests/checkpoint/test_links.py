"""Checkpoints that were moved and linked, and leftovers of every kind: none blocks a start or a save."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from shoal.checkpoint import commit
from shoal.checkpoint import store as store_module
from shoal.checkpoint.manifest import committed, resolve_checkpoint, verify
from shoal.cli.checkpoint import remove_checkpoint
from shoal.errors import CheckpointError, UnreadableError
from shoal.runtime.files import reading
from tests.checkpoint.damage import files_of, permissions_count
from tests.checkpoint.ranks import load_latest, open_store, save_steps
from tests.pool import Pool


def move_and_link(checkpoint: Path) -> Path:
    """Move a checkpoint to another place, as to a larger disk, with a link in its stead."""
    large = checkpoint.parents[2] / "large"
    large.mkdir(exist_ok=True)
    moved = checkpoint.rename(large / checkpoint.name)
    checkpoint.symlink_to(moved)
    return moved


@pytest.fixture
def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000020"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_linked_checkpoint_is_resumed_from(pool: Pool, run: Path, newest: Path, world_size: int):
    move_and_link(newest)
    assert verify(newest) == []
    assert pool.run(load_latest, world_size, run / "checkpoints") == [20] * world_size


def save_and_keep_one(folder: Path, steps: list[int]) -> None:
    save_steps(folder, steps, keep_last=1)


def test_retention_removes_the_link_and_not_what_it_leads_to(pool: Pool, run: Path, newest: Path):
    moved = [move_and_link(newest.with_name("step-00000010")), move_and_link(newest)]
    before = [files_of(folder) for folder in moved]
    pool.run(save_and_keep_one, 1, run / "checkpoints", [30, 40])
    assert [path.name for path in committed(run / "checkpoints")] == ["step-00000040"]
    assert [files_of(folder) for folder in moved] == before
    assert not list((run / "checkpoints").glob(".step-*"))
    assert pool.run(load_latest, 1, run / "checkpoints") == [40]


def test_thinning_leaves_what_is_linked_whole(run: Path, newest: Path):
    moved = move_and_link(newest)
    commit.keep_weights_only(newest)
    assert (moved / "optimizer").is_dir()
    assert verify(newest) == []


def test_rm_removes_the_link_alone(run: Path, newest: Path):
    moved = move_and_link(newest)
    remove_checkpoint(newest, force=True)
    assert not os.path.lexists(newest)
    assert verify(moved) == []
    assert (newest.parent / "LATEST").read_text() == "10\n"


def test_a_link_that_leads_nowhere_stops_a_start_and_no_save(pool: Pool, run: Path, newest: Path):
    newest.rename(newest.with_name("elsewhere"))
    newest.symlink_to("not-mounted")
    with pytest.raises(UnreadableError, match="a link to not-mounted, cannot be read"):
        resolve_checkpoint(run)
    with pytest.raises(AssertionError, match="a link to not-mounted, cannot be read"):
        pool.run(load_latest, 1, run / "checkpoints")
    assert os.readlink(newest) == "not-mounted"
    pool.run(save_steps, 1, run / "checkpoints", [20])
    assert os.readlink(newest.with_name("bad-step-00000020")) == "not-mounted"
    assert pool.run(load_latest, 1, run / "checkpoints") == [20]


def save_where_reading_fails(folder: Path, step: int) -> str:
    def fail(path: Path) -> list[str]:
        with reading(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with mock.patch.object(store_module, "verify", fail), pytest.raises(CheckpointError) as caught:
        save_steps(folder, [step])
    return str(caught.value)


def test_a_linked_step_that_cannot_be_read_now_fails_a_save_and_stays(pool: Pool, run: Path, newest: Path):
    moved = move_and_link(newest)
    (said,) = pool.run(save_where_reading_fails, 1, newest.parent, 20)
    assert "EIO" in said
    assert newest.is_symlink()
    assert files_of(moved)


def test_a_file_with_a_steps_name_is_set_aside(pool: Pool, run: Path, newest: Path):
    newest.with_name("step-00000030").write_text("mine")
    assert pool.run(load_latest, 1, run / "checkpoints") == [20]
    assert newest.with_name("bad-step-00000030").read_text() == "mine"


def leave(folder: Path, elsewhere: Path, names: list[str]) -> None:
    """Leave two links, a file and folders under hidden names."""
    (folder / names[0]).symlink_to(elsewhere)
    (folder / names[1]).symlink_to("nowhere")
    (folder / names[2]).write_text("")
    for name in names[3:]:
        (folder / name / "in").mkdir(parents=True)


def test_leftovers_of_every_kind_go_and_nothing_behind_them(pool: Pool, run: Path, newest: Path):
    names = [f".step-00000010.tmp-0123abc{number}" for number in range(4)]
    names += [".whole-0123abcd", ".gather-0123abcd", ".nonce-0123456789abcdef-12", ".LATEST.1.tmp"]
    names += [".step-00000010.rm-0123abcd", "step-00000020/.manifest.json.7.tmp"]
    leave(newest.parent, run / "checkpoints/step-00000010", names)
    assert pool.run(load_latest, 1, run / "checkpoints") == [20]
    assert not list(newest.parent.glob(".*")) + list(newest.glob(".*"))
    assert verify(newest.with_name("step-00000010")) == []


def test_hidden_files_of_somebody_else_stay_and_block_nothing(pool: Pool, run: Path, newest: Path):
    names = [".step-x", ".step-notes", ".step-1", ".whole-x", ".gather-mine", ".nonce-x", ".LATEST.old.tmp"]
    leave(newest.parent, newest, names)
    pool.run(save_and_keep_one, 1, run / "checkpoints", [30])
    assert pool.run(load_latest, 1, run / "checkpoints") == [30]
    assert {path.name for path in newest.parent.glob(".*")} == set(names)


def test_retention_leaves_a_file_with_a_steps_name(pool: Pool, run: Path, newest: Path):
    file = newest.with_name("step-00000005")
    file.write_text("mine")
    pool.run(save_and_keep_one, 1, run / "checkpoints", [30])
    assert file.read_text() == "mine"
    assert [path.name for path in committed(run / "checkpoints")] == ["step-00000030", file.name]


def open_and_save(folder: Path) -> None:
    with permissions_count():
        open_store(folder)
        save_steps(folder, [30])


def test_a_leftover_that_cannot_be_removed_is_named_and_stays(
    pool: Pool, run: Path, newest: Path, caplog: pytest.LogCaptureFixture
):
    stuck = newest.with_name(".step-00000010.rm-0123abcd")
    (stuck / "model").mkdir(parents=True)
    (stuck / "model/shard").write_text("")
    (stuck / "model").chmod(0o555)
    with permissions_count():
        commit.remove_leftovers(newest.parent)
    assert f"leftover {stuck} could not be removed, and stays: Permission denied" in caplog.text
    pool.run(open_and_save, 1, newest.parent)
    assert stuck.is_dir()
    assert verify(newest.with_name("step-00000030")) == []


@pytest.mark.parametrize("kind", ["folder", "dangling", "itself", "unreadable"])
def test_nothing_at_latest_stops_a_start(pool: Pool, run: Path, kind: str):
    latest = run / "checkpoints/LATEST"
    latest.unlink()
    if kind == "folder":
        (latest / "mine").mkdir(parents=True)
    elif kind == "unreadable":
        latest.write_text("7\n")
        latest.chmod(0)
    else:
        latest.symlink_to("LATEST" if kind == "itself" else "nowhere")
    assert pool.run(load_latest, 1, run / "checkpoints") == [20]
    assert latest.read_text() == "20\n"
    assert kind != "folder" or (run / "checkpoints/LATEST.bad/mine").is_dir()
