from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shoal.data.dataset import TokenSplit, open_dataset, seal, verify_dataset
from shoal.data.loader import Windows
from shoal.errors import DataError


@pytest.fixture
def made(prepare, tmp_path):
    text = tmp_path / "in.txt"
    text.write_text("It was the best of times. " * 50)
    return prepare(text, split="8,1,1")[0]


def edit_manifest(dataset, **changes):
    path = dataset.path / "manifest.json"
    known = json.loads(path.read_text())
    del known["digest"]
    path.write_text(json.dumps(seal({**known, **changes})))


def test_a_dataset_opens_with_its_facts(made):
    dataset = open_dataset(made.path)
    assert (dataset.vocab_size, dataset.eod_id) == (257, 256)
    assert dataset.tokenizer_path == made.path / "tokenizer.json"
    train = dataset.split("train")
    assert train.num_tokens == dataset.manifest["splits"]["train"]["tokens"] == len(train.tokens)
    assert train.tokens.dtype == np.uint16
    assert not train.tokens.flags.writeable
    assert dataset.split("nosuch") is None


def test_the_fingerprint_follows_the_content_not_the_place(made, prepare, tmp_path):
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(made.path, moved)
    assert open_dataset(moved).fingerprint == made.fingerprint
    other = tmp_path / "other.txt"
    other.write_text("It was the worst of times. " * 50)
    assert prepare(other, split="8,1,1", output=tmp_path / "o")[0].fingerprint != made.fingerprint


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "validation.bin"])
def test_a_file_of_another_length_is_refused_at_once(made, name):
    path = made.path / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train|validation"):
        open_dataset(made.path)


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "test.bin", "tokenizer.json"])
def test_verify_finds_one_flipped_bit(made, name):
    verify_dataset(made.path)
    data = bytearray((made.path / name).read_bytes())
    data[-3] ^= 1
    (made.path / name).write_bytes(data)
    with pytest.raises(DataError, match=name.split(".")[0]):
        verify_dataset(made.path)


def test_an_edited_manifest_is_found_at_once_and_one_without_a_digest_opens(made):
    path = made.path / "manifest.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | {"eod_id": 7}))
    with pytest.raises(DataError, match=r"manifest.json was damaged or edited: its digest does not fit"):
        open_dataset(made.path)
    del known["digest"]  # as earlier versions wrote it
    path.write_text(json.dumps(known))
    assert open_dataset(made.path).fingerprint == made.fingerprint


def test_another_tokenizer_in_the_folder_is_found_at_once(made):
    path = made.path / "tokenizer.json"
    path.write_text(path.read_text().replace('"a"', '"\u0001"'))
    with pytest.raises(DataError, match=r"tokenizer.json changed since it was prepared"):
        open_dataset(made.path)


@pytest.mark.parametrize("strange", [257, 65535])
def test_an_id_outside_the_vocabulary_is_a_sentence_where_it_is_read(made, strange):
    path = made.path / "train.bin"
    tokens = np.fromfile(path, np.uint16)
    tokens[100] = strange
    tokens.tofile(path)
    windows = Windows([open_dataset(made.path).split("train")], 16)
    windows.read(np.array([0, 5]))
    told = rf"train.bin holds id {strange} at position 100; the vocabulary has 257 ids"
    with pytest.raises(DataError, match=told):
        windows.read(np.array([0, 6]))


def test_a_negative_id_is_one_outside_the_vocabulary():
    tokens = np.array([1, -2, 3], np.int32)
    with pytest.raises(DataError, match=r"x.bin holds id -2 at position 11"):
        TokenSplit("train", tokens, 1, Path("x.bin"), 9).check_ids(tokens, 10)


def test_another_dtype_is_refused(made):
    edit_manifest(made, dtype="int32")
    with pytest.raises(DataError, match="dtype is uint16, the manifest says int32"):
        open_dataset(made.path)


@pytest.mark.parametrize(
    ("path", "text"),
    [("nosuch", "there is no dataset folder"), (".", "is not a finished dataset: it has no manifest.json")],
)
def test_no_dataset_is_a_sentence(tmp_path, path, text):
    with pytest.raises(DataError, match=text):
        open_dataset(tmp_path / path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": "other"}',
        '{"format": "shoal-dataset", "version": 99}',
        "[" * 100_000,
    ],
)
def test_a_garbled_manifest_is_a_sentence(made, content):
    (made.path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest|format version"):
        open_dataset(made.path)


@pytest.mark.parametrize("key", ["dtype", "splits", "tokenizer", "vocab_size", "eod_id"])
@pytest.mark.parametrize("value", [None, "x", [1], {"train": {}}])
def test_a_manifest_with_odd_values_is_a_sentence(made, key, value):
    edit_manifest(made, **{key: value})
    with pytest.raises(DataError):
        open_dataset(made.path)


def test_a_manifest_cannot_point_outside_its_folder(made):
    edit_manifest(made, tokenizer={"file": "../in.txt", "xxh3": "0"})
    with pytest.raises(DataError, match="no tokenizer file"):
        open_dataset(made.path)
