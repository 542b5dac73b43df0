"""What cannot be read for a moment is not damage; what was set aside and is whole comes back."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from shoal.checkpoint import manifest
from shoal.checkpoint.manifest import committed, resolve_checkpoint, verify
from shoal.cli.checkpoint import list_checkpoints, verify_checkpoints
from shoal.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, UnreadableError
from shoal.runtime.files import alone_in
from tests.checkpoint.damage import cut_short, files_of, no_file_left_to_open, permissions_count
from tests.checkpoint.ranks import open_store, save_steps
from tests.pool import Pool


@pytest.fixture
def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000020"


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_a_file_or_folder_without_permission_is_named_and_no_damage(newest: Path):
    for path in (*files_of(newest), newest / "model", newest):
        mode = path.stat().st_mode
        path.chmod(0)
        try:
            with (
                permissions_count(),
                pytest.raises(UnreadableError, match=r"Permission denied \(EACCES\)") as e,
            ):
                verify(newest)
            assert str(path) in e.value.message
            assert "nothing was changed" in e.value.hint
            with permissions_count(), pytest.raises(UnreadableError, match="EACCES"):
                resolve_checkpoint(newest.parents[1])  # nor does an older one serve in its place
        finally:
            path.chmod(mode)
    assert verify(newest) == []


def test_a_checkpoints_folder_that_cannot_be_listed_is_not_an_empty_one(run: Path):
    folder = run / "checkpoints"
    folder.chmod(0)
    try:
        with permissions_count(), pytest.raises(UnreadableError, match="EACCES"):
            committed(folder)
    finally:
        folder.chmod(0o755)
    folder.rename(run / "moved")
    assert committed(folder) == []
    folder.symlink_to(run / "not-mounted")
    with pytest.raises(UnreadableError, match=r"a link to .*not-mounted"):
        committed(folder)
    folder.unlink()
    folder.write_text("")
    with pytest.raises(UnreadableError, match="ENOTDIR"):
        committed(folder)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EINTR])
def test_an_error_of_the_disk_is_told_by_its_name(newest: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    real = io.open

    def failing(file, *args, **named):
        if str(newest) in str(file):
            raise OSError(number, os.strerror(number), str(file))
        return real(file, *args, **named)

    monkeypatch.setattr(io, "open", failing)
    with pytest.raises(UnreadableError, match=errno.errorcode[number]):
        verify(newest)


def test_too_many_open_files_are_no_damage_in_either_reader(newest: Path, monkeypatch: pytest.MonkeyPatch):
    with no_file_left_to_open(), pytest.raises(UnreadableError, match="EMFILE"):
        verify(newest)
    shard = next(path for path in files_of(newest) if path.suffix == ".safetensors")
    with no_file_left_to_open(), pytest.raises(OSError, match="Too many open files"):
        manifest._check_tensor_file(shard, shard.name)  # whose own error is "no such file"


def test_memory_that_is_short_is_no_damage(newest: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "hash_file", lambda path: bytearray(1 << 60))
    with pytest.raises(UnreadableError, match="ENOMEM"):
        verify(newest)


def look_for_the_newest(folder: Path) -> str:
    """Open a store and ask for the newest checkpoint, as somebody for whom permissions count."""
    with permissions_count():
        try:
            path = open_store(folder).latest()
        except CheckpointError as error:
            return str(error)
    return path.name if path else ""


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_start_stops_on_all_ranks_and_touches_nothing(pool: Pool, run: Path, newest: Path, world_size: int):
    shard = next(path for path in files_of(newest) if path.suffix == ".safetensors")
    before = names(run)
    shard.chmod(0)
    told = pool.run(look_for_the_newest, world_size, run / "checkpoints")
    assert all("verifying step-00000020 failed" in text and "EACCES" in text for text in told), told
    assert names(run) == before
    shard.chmod(0o644)
    assert pool.run(look_for_the_newest, world_size, run / "checkpoints") == ["step-00000020"] * world_size


def test_an_older_one_that_cannot_be_read_stops_nobody(pool: Pool, run: Path):
    (run / "checkpoints/step-00000010/manifest.json").chmod(0)
    assert pool.run(look_for_the_newest, 1, run / "checkpoints") == ["step-00000020"]


def save_the_same_step(folder: Path) -> str:
    """Save step 20 again, as somebody for whom permissions count; return what that raised."""
    with permissions_count():
        try:
            save_steps(folder, [20])
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_save_of_a_step_that_cannot_be_read_fails_and_touches_nothing(pool: Pool, run: Path, newest: Path):
    before = names(run)
    (newest / "state.json").chmod(0)
    assert "Permission denied (EACCES)" in pool.run(save_the_same_step, 1, run / "checkpoints")[0]
    assert names(run) == before
    (newest / "state.json").chmod(0o644)
    inode = (newest / "state.json").stat().st_ino
    assert pool.run(save_the_same_step, 1, run / "checkpoints") == [""]
    assert (newest / "state.json").stat().st_ino == inode


def test_verify_takes_back_what_is_whole(run: Path, newest: Path, capsys: pytest.CaptureFixture[str]):
    older = newest.with_name("step-00000010")
    newest.rename(newest.with_name("bad-step-00000020-2"))
    older.rename(older.with_name("bad-step-00000010"))
    cut_short(older.with_name("bad-step-00000010") / "state.json")
    assert verify_checkpoints(run) == EXIT_DONE
    said = capsys.readouterr().out
    assert "bad-step-00000020-2: good, and in use again as step-00000020" in said
    assert "bad-step-00000010: set aside: state.json has" in said
    assert resolve_checkpoint(run) == newest
    assert (run / "checkpoints/LATEST").read_text() == "20\n"
    assert not older.exists()


def test_verify_takes_nothing_back_over_a_step_that_is_there_or_under_a_wrong_name(
    run: Path, newest: Path, capsys: pytest.CaptureFixture[str]
):
    older = newest.with_name("step-00000010").rename(newest.with_name("bad-step-00000020"))
    assert verify_checkpoints(older) == EXIT_FAILED
    assert "its manifest says step 10" in capsys.readouterr().out
    older.rename(older.with_name("step-00000010"))
    newest.rename(older)
    newest.symlink_to("nowhere")
    assert verify_checkpoints(run) == EXIT_FAILED
    said = capsys.readouterr().out
    assert "good, but not restored: step-00000020 exists, too" in said
    assert "a link to nowhere, cannot be read" in said
    assert os.readlink(newest) == "nowhere"


def test_latest_moves_to_no_checkpoint_that_is_damaged(run: Path, newest: Path):
    older = newest.with_name("step-00000010")
    older.rename(older.with_name("bad-step-00000010"))
    cut_short(newest / "state.json")
    assert verify_checkpoints(run) == EXIT_FAILED
    assert (run / "checkpoints/LATEST").read_text() == "10\n"


def test_verify_from_inside_a_checkpoint_takes_nothing_back_while_a_run_is_at_work(
    run: Path, newest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    older = newest.with_name("step-00000010")
    older.rename(older.with_name("bad-step-00000010"))
    monkeypatch.chdir(newest)
    with alone_in(run):
        verify_checkpoints(Path(".."))
    assert f"another process is at work in {run}" in capsys.readouterr().out
    assert not older.exists()
    verify_checkpoints(Path(".."))
    assert older.exists()


def test_verify_and_ls_say_what_cannot_be_read(run: Path, newest: Path, capsys: pytest.CaptureFixture[str]):
    (newest / "state.json").chmod(0)
    with permissions_count():
        assert verify_checkpoints(run) == EXIT_FAILED
        assert list_checkpoints(run) == EXIT_DONE
    assert capsys.readouterr().out.count("EACCES") == 2
