"""Files are compared with their digests beside the first steps; what was right is not read again."""

from __future__ import annotations

import shutil

import pytest

from shoal.data import verify
from shoal.data.dataset import open_dataset
from shoal.data.verify import MEMORY, Verifier
from shoal.errors import DataError
from tests.tiny_dataset import random_dataset


@pytest.fixture
def data(tmp_path):
    return random_dataset(tmp_path / "data")


def flip(path, place=1000):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def verifier(data, run_dir, mode="once", patience_s=30.0):
    run_dir.mkdir(exist_ok=True)
    return Verifier(open_dataset(data).digests, mode, run_dir, patience_s)


def verified(data, run_dir, mode="once"):
    """Verify to the end; return what the page said."""
    one = verifier(data, run_dir, mode)
    one.begin(0)
    one.wait()
    return one.plan


def test_a_flipped_bit_is_named_and_what_was_right_is_not_read_again(data, tmp_path, caplog):
    caplog.set_level("INFO", "shoal")
    assert verified(data, tmp_path / "a").startswith("once: 6 file(s)")
    assert "data verified: 6 file(s)" in caplog.text
    assert "GB/s" in caplog.text
    assert verified(data, tmp_path / "b") == "once: the same files were read and found right before"
    flip(data / "train.bin")  # which changes its time, too
    one = verifier(data, tmp_path / "b")
    assert one.plan.startswith("once: 1 file(s)")
    one.begin(7)
    with pytest.raises(DataError, match=r"train.bin changed since it was prepared.* steps after 7"):
        one.wait()
    with pytest.raises(DataError, match=r"train.bin"):
        one.poll()
    with pytest.raises(DataError, match=r"train.bin"):  # damage is not remembered as right
        verified(data, tmp_path / "b")


def test_full_reads_all_before_the_first_step_at_every_start(data, tmp_path):
    assert verified(data, tmp_path / "run").startswith("once: 6")
    flip(data / "validation.bin")
    with pytest.raises(DataError, match=r"validation.bin changed"):
        verifier(data, tmp_path / "run", "full").begin(0)
    flip(data / "validation.bin")
    for _ in range(2):
        assert verified(data, tmp_path / "run", "full").startswith("full: 6 file(s)")


def test_off_reads_nothing(data, tmp_path):
    flip(data / "train.bin")
    assert verified(data, tmp_path / "run", "off") == "off"


def test_a_copy_is_read_again(data, tmp_path):
    verified(data, tmp_path / "run")
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)  # with the memory, and with each file's time
    assert verified(copy, tmp_path / "run").startswith("once: 6")


def test_where_the_dataset_cannot_be_written_the_run_remembers(data, tmp_path):
    (data / MEMORY).mkdir()  # root may write everywhere, but not here
    assert verified(data, tmp_path / "run").startswith("once: 6")
    assert verified(data, tmp_path / "run").endswith("before")
    assert verified(data, tmp_path / "other").startswith("once: 6")


@pytest.mark.parametrize("content", ["", "[1]", "\x00", '{"train.bin": 3}'])
def test_a_garbled_memory_is_no_memory(data, tmp_path, content):
    (data / MEMORY).write_text(content)
    assert verified(data, tmp_path / "run").startswith("once: 6")
    assert verified(data, tmp_path / "run").endswith("before")


def test_a_checkpoint_waits_for_the_reading_but_not_for_ever(data, tmp_path, monkeypatch, caplog):
    import threading

    go_on = threading.Event()
    monkeypatch.setattr(verify, "check_digest", lambda path, digest: go_on.wait(60))
    one = verifier(data, tmp_path / "run", patience_s=0.1)
    one.begin(0)
    one.wait()
    one.wait()
    assert caplog.text.count("the data is not verified yet") == 1
    go_on.set()
