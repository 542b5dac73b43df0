"""Checkpoints of hosts without a shared folder, each with its part: ranks 0, 1 are north, 2, 3 south."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from shoal.checkpoint import commit
from shoal.checkpoint.manifest import (
    committed,
    read_manifest,
    read_state,
    resolve_checkpoint,
    step_name,
    verify,
)
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.tensors import read_folder, saved_shapes
from shoal.cli import checkpoint as commands
from shoal.errors import CheckpointError
from tests.cases import every
from tests.checkpoint.ranks import cut_tensors, full_tensors, same, whole
from tests.pool import Pool, RankError

NORTH, SOUTH = "north", "south"


def store_of(folder: Path, names: tuple[str, ...], **retention) -> CheckpointStore:
    """Open the store of this rank's host."""
    name = names[dist.get_rank()]
    with mock.patch("socket.gethostname", return_value=name):
        return CheckpointStore(folder / name, group=dist.new_group(backend="gloo"), **retention)


def save(folder: Path, steps: list[int], cut: bool, names=(NORTH, NORTH, SOUTH, SOUTH), **retention) -> None:
    store = store_of(folder, names, **retention)
    files = {"config.toml": b"seed = 1\n"} if dist.get_rank() == 0 else {}
    for step in steps:
        tensors = cut_tensors(step) if cut else full_tensors(step)
        store.save(step, tensors, {"step": step}, files)
    store.wait()


def resume(folder: Path, cut: bool, names=(NORTH, NORTH, SOUTH, SOUTH)) -> int | str | None:
    """Load the newest checkpoint, look at each value and at the state; return the step or the refusal."""
    store = store_of(folder, names)
    try:
        path = store.latest()
    except CheckpointError as error:
        return str(error)
    if path is None:
        return None
    step = read_state(path)["step"]
    assert path.name == step_name(step)
    tensors = cut_tensors(-1) if cut else full_tensors(-1)
    store.load(path, tensors)
    assert same(whole(tensors), full_tensors(step))
    return step


@pytest.fixture(params=[False, True], ids=["whole", "cut"])
def apart(request, pool: Pool, tmp_path: Path) -> Path:
    """Two hosts' folders with steps 10 and 20."""
    pool.run(save, 4, tmp_path, [10, 20], request.param)
    return tmp_path


def listed(folder: Path) -> set[str]:
    return {name for name in read_manifest(folder).files if name.endswith(".safetensors")}


def test_each_host_keeps_its_own_part_with_its_own_manifest(apart: Path):
    north, south = (apart / name / "step-00000020" for name in (NORTH, SOUTH))
    assert listed(north)
    assert listed(south)
    assert not listed(north) & listed(south)
    assert set(read_manifest(north).elsewhere) == {SOUTH}
    assert set(read_manifest(north).elsewhere[SOUTH]) == listed(south)
    for part in (north, south):
        assert verify(part) == []
        assert (part / "config.toml").read_bytes() == b"seed = 1\n"
        assert (part.parent / "LATEST").read_text() == "20\n"
    assert sorted(path.name for path in (apart / NORTH).iterdir()) == [
        "LATEST",
        "step-00000010",
        "step-00000020",
    ]


@pytest.mark.parametrize("names", [(NORTH, NORTH, SOUTH, SOUTH), (SOUTH, NORTH)], ids=["same", "other"])
@pytest.mark.parametrize("cut", every(2, [True, False]), ids=["into-cut", "into-whole"])
def test_hosts_bring_their_parts_together_to_resume(pool: Pool, apart: Path, names, cut):
    assert pool.run(resume, len(names), apart, cut, names) == [20] * len(names)
    assert not list(apart.glob("*/.whole-*"))


def test_a_lost_part_is_named_with_its_host_and_files_and_nothing_is_touched(pool: Pool, apart: Path):
    missing = sorted(listed(apart / SOUTH / "step-00000020"))
    shutil.rmtree(apart / SOUTH)
    for names in ((NORTH, NORTH, SOUTH, SOUTH), (NORTH,)):
        [answer, *_] = pool.run(resume, len(names), apart, False, names)
        assert f"of step-00000020, host south has {missing[0]}" in answer
        assert "bring that host or its folder back" in answer
    assert [path.name for path in committed(apart / NORTH)] == ["step-00000020", "step-00000010"]


def test_a_kill_between_two_hosts_commits_costs_that_step_only(pool: Pool, apart: Path):
    shutil.rmtree(apart / SOUTH / "step-00000020")
    assert pool.run(resume, 4, apart, False) == [10] * 4
    assert (apart / NORTH / "bad-step-00000020").exists()
    pool.run(save, 4, apart, [20], False)
    assert pool.run(resume, 4, apart, False) == [20] * 4


def test_parts_of_two_different_saves_are_not_put_together(pool: Pool, apart: Path):
    """South's step 20 is of another history: north's manifest knows its files by their digests."""
    other = apart / "other"
    pool.run(save, 4, other, [21], False)
    for name in (NORTH, SOUTH):
        shutil.move(other / name / "step-00000021", apart / name / "step-00000021")
    pool.run(save, 4, apart / "third", [21], True)
    shutil.rmtree(apart / SOUTH / "step-00000021")
    shutil.move(apart / "third" / SOUTH / "step-00000021", apart / SOUTH / "step-00000021")
    assert pool.run(resume, 4, apart, False) == [20] * 4


def test_a_damaged_part_sets_the_step_aside_on_all_hosts(pool: Pool, apart: Path):
    file = apart / SOUTH / "step-00000020" / min(listed(apart / SOUTH / "step-00000020"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert pool.run(resume, 4, apart, False) == [10] * 4
    assert (apart / SOUTH / "bad-step-00000020").exists()
    assert (apart / NORTH / "bad-step-00000020").exists()


def test_a_whole_checkpoint_on_one_host_serves_hosts_that_have_none(pool: Pool, tmp_path: Path):
    pool.run(save, 1, tmp_path, [5], False, (NORTH,))
    assert pool.run(resume, 4, tmp_path, True) == [5] * 4
    assert not (tmp_path / SOUTH / "LATEST").exists()


def test_retention_thins_every_part(pool: Pool, tmp_path: Path):
    names = (NORTH, NORTH, SOUTH, SOUTH)
    pool.run(_save_thinly, 4, tmp_path, names)
    for name in (NORTH, SOUTH):
        assert [path.name[-2:] for path in committed(tmp_path / name)] == ["30", "20"]
        assert read_manifest(tmp_path / name / "step-00000020").weights_only
        assert verify(tmp_path / name / "step-00000020") == []
    assert pool.run(resume, 4, tmp_path, False) == [30] * 4


def _save_thinly(folder, names):
    save(folder, [10, 20, 30], False, names, keep_last=1, keep_every=20, keep_every_weights_only=True)


def test_a_shared_folder_gives_one_whole_checkpoint(pool: Pool, tmp_path: Path):
    pool.run(save, 4, tmp_path, [10], False, (NORTH,) * 4)
    assert read_manifest(tmp_path / NORTH / "step-00000010").elsewhere == {}
    assert resolve_checkpoint(tmp_path / NORTH).name == "step-00000010"


def test_one_part_alone_is_not_taken_for_a_model(apart: Path):
    with pytest.raises(CheckpointError, match=r"one host's part of a checkpoint: host south has \w+/shard"):
        resolve_checkpoint(apart / NORTH)


def test_gather_makes_a_part_whole(apart: Path, capsys):
    assert commands.gather_parts(apart / NORTH, (apart / SOUTH,)) == 0
    checkpoint = resolve_checkpoint(apart / NORTH)
    assert checkpoint.name == "step-00000020"
    tensors = {name.removeprefix("model."): t for name, t in full_tensors(-1).items() if "model." in name}
    assert saved_shapes(checkpoint, ["model"])
    read_folder(checkpoint / "model", tensors, group=None)
    assert same(
        tensors, {name.removeprefix("model."): t for name, t in full_tensors(20).items() if "model." in name}
    )
    assert ": complete, with the files of " in capsys.readouterr().out


def test_a_file_of_another_host_comes_with_a_folder_that_this_host_has_nothing_in(tmp_path: Path):
    checkpoint, theirs = tmp_path / step_name(10), tmp_path / "theirs"
    checkpoint.mkdir()
    theirs.write_bytes(b"moments")
    commit.adopt(checkpoint, "optimizer/shard-2.safetensors", theirs)
    assert (checkpoint / "optimizer/shard-2.safetensors").read_bytes() == b"moments"
    assert set(tmp_path.iterdir()) == {checkpoint, theirs}


def test_gather_that_was_killed_goes_on(apart: Path):
    with (
        mock.patch.object(commands, "write_text", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        commands.gather_parts(apart / NORTH, (apart / SOUTH,))
    assert verify(apart / NORTH / "step-00000020") == []
    (apart / NORTH / ".gather-01234567").touch()
    shutil.rmtree(apart / SOUTH / "step-00000020")  # it is all here by now
    assert commands.gather_parts(apart / NORTH, (apart / SOUTH,)) == 0
    resolve_checkpoint(apart / NORTH)
    commit.remove_leftovers(apart / NORTH)
    assert not list((apart / NORTH).glob(".*"))


def test_gather_names_what_it_cannot_find(apart: Path):
    with pytest.raises(CheckpointError, match=r"of step-00000020, which host south kept, is in none"):
        commands.gather_parts(apart / NORTH, (apart / NORTH,))


def test_a_full_disk_on_the_receiving_host_is_said_on_all(pool: Pool, apart: Path):
    with pytest.raises(RankError, match="the disk is full"):
        pool.run(_resume_with_full_disk, 4, apart)


def _resume_with_full_disk(folder):
    opened = Path.open

    def open_full(path, mode="r", *rest, **named):
        file = opened(path, mode, *rest, **named)
        if mode == "xb":
            file = mock.MagicMock(wraps=file)
            file.__enter__.return_value.write.side_effect = OSError(errno.ENOSPC, "No space left on device")
        return file

    with mock.patch.object(Path, "open", open_full):
        store_of(folder, (NORTH, NORTH, SOUTH, SOUTH)).latest()
