"""Saving, finding and loading on one and several ranks."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from shoal.checkpoint import commit
from shoal.checkpoint import tensors as tensor_files
from shoal.checkpoint.manifest import committed, read_manifest, read_state, verify
from shoal.checkpoint.tensors import load_weights, model_tensors, share_out
from shoal.errors import CheckpointError
from tests.cases import every
from tests.checkpoint import ranks
from tests.checkpoint.damage import forge_manifest
from tests.checkpoint.ranks import full_tensors, load_latest, save_steps
from tests.checkpoint.tiny import Tiny
from tests.pool import Pool, RankError


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "cut"),
    every(
        2,
        [
            *((1, 1, False), (1, 1, True), (2, 2, True), (2, 2, False), (2, 1, False), (2, 1, True)),
            *((1, 2, True), (1, 2, False), (4, 2, False), (4, 2, True), (2, 4, True), (2, 4, False)),
        ],
    ),
)
def test_what_was_saved_is_loaded_on_another_number_of_ranks(
    pool: Pool, tmp_path: Path, saved_on, loaded_on, cut
):
    pool.run(save_steps, saved_on, tmp_path, [3, 12], cut)
    assert pool.run(load_latest, loaded_on, tmp_path, cut, 0) == [12] * loaded_on
    assert pool.run(load_latest, loaded_on, tmp_path, cut, -1) == [12] * loaded_on
    assert pool.run(load_latest, loaded_on, tmp_path, not cut) == [12] * loaded_on
    assert (tmp_path / "LATEST").read_text() == "12\n"
    assert read_state(tmp_path / "step-00000012")["step"] == 12


def test_a_store_without_checkpoints_has_no_latest(pool: Pool, tmp_path: Path):
    assert pool.run(load_latest, 2, tmp_path / "none") == [None, None]


def test_save_returns_after_the_copy_and_the_next_one_waits_and_says_so(pool: Pool, tmp_path: Path):
    [(returned_early, waited, messages)] = pool.run(ranks.save_twice_quickly, 1, tmp_path)
    assert returned_early
    assert waited
    assert "checkpoint of step 20 waits for that of step 10" in messages


def test_host_copies_use_their_memory_again(pool: Pool):
    assert pool.run(ranks.buffers_of_two_saves, 1) == [True]


def test_a_save_does_not_copy_over_a_gpu_what_lies_in_host_memory(pool: Pool, tmp_path: Path):
    """DCP would, where it sees a GPU: in the stream of the save's thread, which is GPU 0's first."""
    assert pool.run(ranks.save_where_a_gpu_is_seen, 1, tmp_path) == [True]


def test_ranks_share_the_writing_of_tensors_that_all_of_them_hold():
    held = {f"model.{index}": (10 + index, False) for index in range(8)} | {"model.cut": (999, True)}
    first, second = share_out([held, held])
    assert first & second == {"model.cut"}
    assert first | second == set(held)
    assert len(first) == len(second) == 5
    alone, other = share_out([{"model.stage0": (5, False)}, {"model.stage1": (5, False)}])
    assert (alone, other) == ({"model.stage0"}, {"model.stage1"})


def test_retention_keeps_the_last_ones_and_every_nth(pool: Pool, tmp_path: Path):
    pool.run(save_steps, 2, tmp_path, [5, 10, 15, 20, 25], False)
    assert [path.name[-2:] for path in committed(tmp_path)] == ["25", "20"]
    retention = {"keep_last": 1, "keep_every": 20, "keep_every_weights_only": True}
    for step in (30, 40, 50):
        pool.run(_save_with, 2, tmp_path, step, retention)
    assert [path.name[-2:] for path in committed(tmp_path)] == ["50", "40", "20"]
    thinned = tmp_path / "step-00000040"
    assert read_manifest(thinned).weights_only
    assert {path.name for path in thinned.iterdir() if path.is_dir()} == {"model"}
    assert verify(thinned) == []


def _save_with(folder, step, retention):
    save_steps(folder, [step], **retention)


def test_weights_only_checkpoint_is_not_resumed_from(pool: Pool, tmp_path: Path):
    retention = {"keep_last": 1, "keep_every": 10, "keep_every_weights_only": True}
    for step in (10, 20):
        pool.run(_save_with, 1, tmp_path, step, retention)
    assert pool.run(ranks.damage_then_latest, 1, tmp_path, ["step-00000020"]) == [[None, None]]
    assert [path.name for path in committed(tmp_path)] == ["step-00000010"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_damaged_checkpoints_are_set_aside_and_never_chosen_again(pool: Pool, run: Path, world_size: int):
    folder = run / "checkpoints"
    found = pool.run(ranks.damage_then_latest, world_size, folder, ["step-00000020"])
    assert found == [["step-00000010"] * 2] * world_size
    assert (folder / "LATEST").read_text() == "10\n"
    assert (folder / "bad-step-00000020").is_dir()
    pool.run(save_steps, world_size, folder, [20])
    pool.run(ranks.damage_then_latest, world_size, folder, ["step-00000020"])
    assert (folder / "bad-step-00000020-2").is_dir()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_full_disk_on_one_rank_fails_the_save_on_all_and_keeps_the_old_one(
    pool: Pool, tmp_path: Path, failing_rank
):
    answers = pool.run(ranks.failing_save, 2, tmp_path, failing_rank)
    for wait, poll in answers:
        assert f"saving step 20 failed on rank {failing_rank}: the disk is full" in wait
        assert "free some space" in wait
        assert poll == wait
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000010", "LATEST"}
    assert (tmp_path / "LATEST").read_text() == "10\n"


def test_a_really_full_disk_leaves_the_old_checkpoint(pool: Pool, small_disk: Path):
    for answer in pool.run(ranks.save_on_small_disk, 2, small_disk / "checkpoints"):
        assert "the disk is full: cannot write" in answer
    assert {path.name for path in (small_disk / "checkpoints").iterdir()} == {"step-00000010", "LATEST"}
    assert pool.run(load_latest, 2, small_disk / "checkpoints") == [10, 10]


def test_step_that_is_there_and_good_is_kept_and_a_bad_one_replaced(pool: Pool, run: Path):
    folder = run / "checkpoints"
    before = (folder / "step-00000020" / "manifest.json").stat().st_mtime_ns
    pool.run(save_steps, 2, folder, [20])
    assert (folder / "step-00000020" / "manifest.json").stat().st_mtime_ns == before
    (folder / "step-00000020" / "state.json").unlink()
    pool.run(save_steps, 2, folder, [20])
    assert verify(folder / "step-00000020") == []
    assert (folder / "bad-step-00000020").is_dir()


def test_tensors_that_do_not_fit_are_named_on_all_ranks(pool: Pool, run: Path):
    for answer in pool.run(ranks.load_misfit, 2, run / "checkpoints"):
        assert "model.new is not in the checkpoint" in answer
        assert "model.embed.weight is in the checkpoint only" in answer
        assert "model.up.weight is [7, 3] in the checkpoint, [7, 4] wanted" in answer


def test_part_of_a_tensor_that_is_missing_is_named(pool: Pool, tmp_path: Path):
    pool.run(save_steps, 2, tmp_path, [20], True)
    (shard,) = (tmp_path / "step-00000020" / "model").glob("shard-00001-*")
    shard.unlink()
    forge_manifest(tmp_path / "step-00000020")
    with pytest.raises(RankError, match=r"tensor model\.\S+ in .* is incomplete or doubled"):
        pool.run(load_latest, 2, tmp_path)


def test_moments_that_were_dropped_are_asked_for_in_vain(pool: Pool, run: Path):
    commit.keep_weights_only(run / "checkpoints" / "step-00000020")
    assert pool.run(load_latest, 1, run / "checkpoints") == [10]
    with pytest.raises(RankError, match="step-00000020 holds no optimizer tensors"):
        pool.run(ranks.load_from, 1, run / "checkpoints", "step-00000020")


def test_one_process_reads_the_weights_of_many_without_a_process_group(run: Path):
    model = Tiny()
    assert set(model_tensors(model)) == {"model.embed.weight", "model.up.weight"}
    assert load_weights(run, model).name == "step-00000020"
    assert torch.equal(model.head.weight, full_tensors(20)["model.embed.weight"])
    assert torch.equal(model.up.weight, full_tensors(20)["model.up.weight"])


def test_weights_for_another_model_are_refused_by_name(run: Path):
    with pytest.raises(
        CheckpointError, match=r"embed.weight is \[10, 4\] in the checkpoint, \[11, 4\] wanted"
    ):
        load_weights(run, Tiny(rows=11))


def test_a_weights_only_step_that_training_comes_back_to_is_saved_whole(pool: Pool, tmp_path: Path):
    retention = {"keep_last": 1, "keep_every": 10, "keep_every_weights_only": True}
    for step in (10, 15):
        pool.run(_save_with, 1, tmp_path, step, retention)
    assert read_manifest(tmp_path / "step-00000010").weights_only
    commit.remove(tmp_path / "step-00000015")  # lost, say; training went on from an older one
    pool.run(_save_with, 1, tmp_path, 10, retention)
    assert not read_manifest(tmp_path / "step-00000010").weights_only
    assert pool.run(load_latest, 1, tmp_path) == [10]


def test_a_file_is_closed_before_it_outgrows_its_limit():
    assert tensor_files._file_numbers({"a": 4, "b": 6, "c": 1, "d": 30, "e": 9, "f": 1}, 10) == {
        **dict.fromkeys("ab", 1),
        "c": 2,
        "d": 3,
        **dict.fromkeys("ef", 4),
    }


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("I/O error: No space left on device (os error 28)", errno.ENOSPC),
        ("No space left on device", errno.ENOSPC),
        ("os error 28", errno.ENOSPC),
        ("I/O error: Input/output error (os error 5)", errno.EIO),
    ],
)
def test_a_disk_error_of_the_library_has_the_systems_number(tmp_path: Path, monkeypatch, words, number):
    def fail(*arguments, **options):
        raise SafetensorError(words)

    monkeypatch.setattr(tensor_files, "save_file", fail)
    with pytest.raises(OSError, match=re.escape(words)) as caught:
        tensor_files.write_file(tmp_path / "x", {})
    assert caught.value.errno == number


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_a_tensor_file_can_be_read_by_whom_the_umask_allows(tmp_path: Path, mask: int, mode: int):
    before = os.umask(mask)
    try:
        tensor_files.write_file(tmp_path / "x", {"a": torch.ones(2)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode


def test_a_store_keeps_every_nth_step_whole_unless_it_is_told_otherwise(pool: Pool, tmp_path: Path):
    for step in (10, 20):
        pool.run(_save_with, 1, tmp_path, step, {"keep_last": 1, "keep_every": 10})
    assert not any(read_manifest(path).weights_only for path in committed(tmp_path))


def test_a_save_says_how_long_training_waited(pool: Pool, tmp_path: Path):
    [seconds] = pool.run(_seconds_of_a_save, 1, tmp_path)
    assert 0 <= seconds < 100


def _seconds_of_a_save(folder):
    store = ranks.open_store(folder)
    seconds = store.save(1, full_tensors(1), {"step": 1}, {})
    store.wait()
    return seconds
