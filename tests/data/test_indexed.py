from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from shoal.data.indexed import IndexedReader, IndexedWriter, token_dtype
from shoal.errors import DataError, ShoalError

DOCUMENTS = [[1, 2, 3], [4], [5, 6]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16, **kwargs):
    with IndexedWriter(prefix, np.dtype(dtype), **kwargs) as writer:
        for document in documents:
            writer.append(np.array(document))
            writer.end_document()
        return writer.finish()


def read(prefix):
    reader = IndexedReader(prefix)
    reader.check()
    return [reader.document(n).tolist() for n in range(reader.num_documents)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_documents_come_back(tmp_path, dtype):
    facts = write(tmp_path / "a", dtype=dtype)
    assert read(tmp_path / "a") == DOCUMENTS
    assert (facts["documents"], facts["tokens"]) == (3, 6)


def test_the_index_is_megatrons_byte_for_byte(tmp_path):
    write(tmp_path / "a")
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i3q4q", 3, 1, 2, 0, 6, 8, 0, 1, 2, 3)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)


def test_whole_documents_at_once_give_the_same_files(tmp_path):
    write(tmp_path / "a")
    with IndexedWriter(tmp_path / "b", np.dtype(np.uint16)) as writer:
        writer.append_documents(np.arange(1, 5), np.array([3, 1]))
        writer.append_documents(np.array([5, 6]), np.array([2]))
        writer.finish()
    for kind in ("bin", "idx"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_a_document_longer_than_a_sequence_can_be_stays_one_document(tmp_path):
    write(tmp_path / "a", [list(range(10)), [1]], max_sequence=4)
    assert read(tmp_path / "a") == [list(range(10)), [1]]
    assert IndexedReader(tmp_path / "a").lengths.tolist() == [4, 4, 2, 1]


def test_no_document_at_all_is_a_readable_pair(tmp_path):
    write(tmp_path / "a", [])
    assert read(tmp_path / "a") == []


def test_the_dtype_follows_from_the_vocabulary():
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.int32


def test_nothing_is_visible_before_the_end(tmp_path):
    with IndexedWriter(tmp_path / "a", np.dtype(np.uint16)) as writer:
        writer.append(np.array([1]))
        assert not (tmp_path / "a.bin").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("idx", lambda data: data[:-1]),
        ("idx", lambda data: data + b"\0"),
        ("idx", lambda data: data[:20]),
        ("idx", lambda data: b""),
        ("idx", lambda data: b"X" + data[1:]),
        ("idx", lambda data: data[:17] + b"\xff" + data[18:]),
        ("idx", lambda data: data[:18] + b"\xff" * 8 + data[26:]),
        ("idx", lambda data: data[:40] + b"\x07" + data[41:]),
        ("bin", lambda data: data[:-1]),
        ("bin", lambda data: data[:-2]),
        ("bin", lambda data: b""),
    ],
)
def test_damage_is_named(tmp_path, kind, change):
    write(tmp_path / "a")
    path = tmp_path / f"a.{kind}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=r"a\.(idx|bin)"):
        read(tmp_path / "a")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a\.idx cannot be read: No such file"):
        IndexedReader(tmp_path / "a")


def test_a_full_disk_is_a_sentence_and_leaves_nothing(small_disk):
    with pytest.raises(ShoalError, match="the disk is full"):
        write(small_disk / "a", [[0] * (1 << 16)] * 8, np.int32)
    assert list(small_disk.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="megatron-core is installed on Linux only")
def test_megatron_reads_our_files(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for dtype in (np.uint16, np.int32):
        write(tmp_path / "a", dtype=dtype)
        theirs = IndexedDataset(str(tmp_path / "a"))
        assert [theirs[n].tolist() for n in range(len(theirs))] == DOCUMENTS
        assert theirs.document_indices.tolist() == [0, 1, 2, 3]
        assert theirs.index.dtype == dtype
