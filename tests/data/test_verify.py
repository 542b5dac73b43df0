"""Files are compared with their digests beside the first steps; what was right is not read again."""

from __future__ import annotations

import errno
import re
import shutil
import threading
from types import SimpleNamespace

import pytest

from shoal.data import dataset, verify
from shoal.data.dataset import open_dataset
from shoal.data.verify import CACHE, Verifier
from shoal.errors import DataError, UnreadableError
from shoal.runtime.files import hash_file
from shoal.train import loop
from tests.tiny_dataset import random_dataset


@pytest.fixture
def data(tmp_path):
    return random_dataset(tmp_path / "data")


def flip(path, place=1000):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def verifier(data, run_dir, mode="once", timeout_s=30.0):
    run_dir.mkdir(exist_ok=True)
    return Verifier(open_dataset(data).digests, mode, run_dir, timeout_s)


def verified(data, run_dir, mode="once"):
    """Verify to the end; return what the page said."""
    one = verifier(data, run_dir, mode)
    begin_and_wait(one)
    return one.plan


def begin_and_wait(one, step=0):
    one.begin(step)
    while one.blocks_training():
        pass
    one.wait()


def test_a_flipped_bit_is_named_and_what_was_right_is_not_read_again(data, tmp_path, caplog):
    caplog.set_level("DEBUG", "shoal")
    assert verified(data, tmp_path / "a").startswith("once: 6 files")
    assert "data verified: 6 files" in caplog.text
    assert "GB/s" in caplog.text
    assert verified(data, tmp_path / "b") == "once: unchanged since they were last verified"
    flip(data / "train.bin")  # which changes its time, too
    one = verifier(data, tmp_path / "b")
    assert one.plan.startswith("once: 1 file")
    with pytest.raises(DataError, match=r"train.bin changed since it was prepared.* steps after 7"):
        begin_and_wait(one, 7)
    with pytest.raises(DataError, match=r"train.bin"):
        one.poll()
    with pytest.raises(DataError, match=r"train.bin"):  # damage is not remembered as right
        verified(data, tmp_path / "b")


def test_full_reads_all_before_the_first_step_at_every_start(data, tmp_path):
    assert verified(data, tmp_path / "run").startswith("once: 6")
    flip(data / "validation.bin")
    with pytest.raises(DataError, match=r"validation.bin changed"):
        verified(data, tmp_path / "run", "full")
    flip(data / "validation.bin")
    for _ in range(2):
        assert verified(data, tmp_path / "run", "full").startswith("full: 6 files")


def test_off_reads_nothing(data, tmp_path):
    flip(data / "train.bin")
    assert verified(data, tmp_path / "run", "off") == "off"


def test_a_copy_is_read_again(data, tmp_path):
    verified(data, tmp_path / "run")
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)  # with the cache, and with each file's time
    assert verified(copy, tmp_path / "run").startswith("once: 6")


def test_where_the_dataset_cannot_be_written_the_cache_is_the_runs(data, tmp_path):
    (data / CACHE).mkdir()  # root may write everywhere, but not here
    assert verified(data, tmp_path / "run").startswith("once: 6")
    assert verified(data, tmp_path / "run").endswith("last verified")
    assert verified(data, tmp_path / "other").startswith("once: 6")


@pytest.mark.parametrize("content", ["", "[1]", "\x00", '{"train.bin": 3}'])
def test_a_garbled_cache_is_no_cache(data, tmp_path, content):
    (data / CACHE).write_text(content)
    assert verified(data, tmp_path / "run").startswith("once: 6")
    assert verified(data, tmp_path / "run").endswith("last verified")


def test_a_checkpoint_waits_for_the_reading_but_not_for_ever(data, tmp_path, monkeypatch, caplog):
    go_on = threading.Event()
    monkeypatch.setattr(verify, "check_digest", lambda path, digest: go_on.wait(60))
    one = verifier(data, tmp_path / "run", timeout_s=0.1)
    one.begin(0)
    one.wait()
    one.wait()
    assert caplog.text.count("a checkpoint is written before the data is verified") == 1
    go_on.set()


@pytest.mark.parametrize(
    "problem", [OSError(errno.EIO, "EIO"), OSError(errno.EMFILE, "EMFILE"), MemoryError()]
)
def test_a_file_that_cannot_be_read_is_a_warning_and_read_again_next_time(
    data, tmp_path, monkeypatch, caplog, problem
):
    caplog.set_level("DEBUG", "shoal")

    def hash_but_one(path):
        if path.name == "train.bin":
            raise problem
        return hash_file(path)

    monkeypatch.setattr(dataset, "hash_file", hash_but_one)
    verified(data, tmp_path / "run")
    assert re.search(
        r"warning: the data could not be verified: \S*train.bin cannot be read: .*\(E", caplog.text
    )
    assert "data verified: 5 files" in caplog.text
    assert "may have used it" not in caplog.text
    one = verifier(data, tmp_path / "run", "full")
    with pytest.raises(UnreadableError, match=r"train.bin cannot be read: .*\(E"):
        begin_and_wait(one)
    monkeypatch.undo()
    assert verified(data, tmp_path / "run").startswith("once: 1 file")


def test_a_file_that_is_gone_when_its_turn_comes_is_a_warning(data, tmp_path, caplog):
    one = verifier(data, tmp_path / "run")
    (data / "train.idx").unlink()
    begin_and_wait(one)
    assert "train.idx cannot be read: No such file or directory (ENOENT)" in caplog.text
    full = verifier(random_dataset(tmp_path / "again"), tmp_path / "run", "full")
    (tmp_path / "again/train.idx").unlink()
    with pytest.raises(UnreadableError, match=r"train.idx cannot be read"):
        begin_and_wait(full)


def test_any_other_error_of_the_thread_is_raised_in_the_loop(data, tmp_path, monkeypatch):
    def fail(path, digest):
        raise RuntimeError("a defect")

    monkeypatch.setattr(verify, "check_digest", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        verified(data, tmp_path / "run")


@pytest.mark.parametrize("stopped", [False, True])
def test_all_ranks_look_at_a_stop_while_one_reads_before_the_first_step(data, tmp_path, monkeypatch, stopped):
    go_on, looked = threading.Event(), []
    monkeypatch.setattr(verify, "_ROUND_S", 0.01)
    monkeypatch.setattr(verify, "check_digest", lambda path, digest: go_on.wait(60))

    def requested():
        looked.append(1)
        if len(looked) == 3 and not stopped:
            go_on.set()
        return len(looked) == 3 and stopped

    def any_rank(flag):
        asked.append(flag)
        return flag or len(asked) < 5  # another rank reads longer

    asked = []
    job = SimpleNamespace(
        config=SimpleNamespace(data=SimpleNamespace(verify="full")),
        process=SimpleNamespace(any=any_rank),
        verifier=verifier(data, tmp_path / "run", "full"),
        stop=SimpleNamespace(requested=requested),
    )
    assert loop._verify(job, 0) == (not stopped)
    assert len(looked) >= 3
    assert stopped or (len(asked) >= 5 and asked[0] and not asked[-1])
    go_on.set()
