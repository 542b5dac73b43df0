"""`shoal dataset ls | verify | show`, as a user types it."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress

import numpy as np
import pytest

from shoal.cli.app import app
from shoal.data.dataset import open_dataset
from shoal.errors import DataError, InputError, UnreadableError
from tests.checkpoint.damage import permissions_count


def shoal(*words):
    """Run a command in this process; return its status."""
    return app([str(word) for word in words], result_action="return_value", exit_on_error=False)


@pytest.fixture
def corpus(prepare, tmp_path):
    """Return a dataset of two files with 40 documents each, whose texts say where they were."""
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} number {n}"}) for n in range(40)]
        lines[3] = json.dumps({"text": ""})  # not kept: all after it have a lower place
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    held_out = tmp_path / "held.txt"
    held_out.write_text("held out")
    options = {"split": "8,1,1", "test": (str(held_out),), "output": tmp_path / "sets/mine"}
    return prepare(tmp_path / "a.jsonl", tmp_path / "b.jsonl", **options)[0]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


def test_ls_names_each_dataset_and_what_does_not_fit(corpus, tmp_path, capsys):
    file = tmp_path / "ls.json"
    assert shoal("dataset", "ls", tmp_path / "sets", "--json", file) == 0
    (row,) = json.loads(file.read_text())["datasets"]
    counted = {name: split.num_documents for name, split in corpus.splits.items()}
    assert row["documents"] == sum(counted.values()) == 79
    assert row["tokens"] == sum(split.num_tokens for split in corpus.splits.values())
    assert row["size_bytes"] == sum(path.stat().st_size for path in corpus.digests)
    assert (row["vocab_size"], row["tokenizer"], row["problem"]) == (257, "bytes", "")
    assert "mine" in capsys.readouterr().out
    flip(corpus.path / "train.bin")  # its size still fits
    assert shoal("dataset", "ls", tmp_path / "sets", "--json", file) == 0
    assert not json.loads(file.read_text())["datasets"][0]["problem"]
    (corpus.path / "train.bin").write_bytes(b"")
    assert shoal("dataset", "ls", tmp_path / "sets", "--json", file) == 0
    assert "damaged" in json.loads(file.read_text())["datasets"][0]["problem"]


@pytest.mark.parametrize("name", ["train.bin", "validation.idx", "tokenizer.json", "manifest.json"])
def test_verify_says_good_or_what_is_wrong(corpus, name, tmp_path, capsys):
    assert shoal("dataset", "verify", corpus.path) == 0
    assert capsys.readouterr().out == f"{corpus.path}: good\n"
    flip(corpus.path / name)
    assert shoal("dataset", "verify", tmp_path / "sets", "--json", tmp_path / "found.json") == 1
    assert name in capsys.readouterr().out
    assert name in json.loads((tmp_path / "found.json").read_text())["datasets"][0]["problem"]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_show_finds_a_documents_text_and_the_file_it_came_from(corpus, split, tmp_path, capsys):
    for number in range(corpus.split(split).num_documents):
        file = tmp_path / "doc.json"
        asked = ("--doc", number, "--split", split, "--json", file)
        assert shoal("dataset", "show", corpus.path, *asked) == 0
        shown = json.loads(file.read_text())["document"]
        assert shown["text"] in capsys.readouterr().out
        if split == "test":
            assert shown["text"] == "held out"
            assert shown["from"].startswith(f"{tmp_path}/held.txt, document 0 of 1")
            continue
        name, _, line = shown["text"].split()
        place = int(line) - (int(line) > 3)
        assert shown["from"].startswith(f"{tmp_path}/{name}.jsonl, document {place} of 39")


def test_show_prints_facts_and_lineage(corpus, capsys):
    assert shoal("dataset", "show", corpus.path) == 0
    said = capsys.readouterr().out
    for text in ("uint16", "tokenizer digest", "end of document", "split 8,1,1", "seed 1234", "rejected 0"):
        assert text in said


def test_show_begins_the_first_document_where_none_is_asked_for(prepare, tmp_path, capsys):
    (tmp_path / "long.txt").write_text("once upon a time " * 50)
    made = prepare(tmp_path / "long.txt", output=tmp_path / "long", split="1,0,0")[0]
    assert shoal("dataset", "show", made.path) == 0
    said = capsys.readouterr().out
    assert "train document 0, 851 tokens, from" in said.replace("\n", " ")
    assert "once upon a time once upon" in said
    assert "... and 791 tokens more" in said
    assert shoal("dataset", "show", made.path, "--split", "validation") == 0  # without documents


def test_a_strangers_text_cannot_command_the_terminal(prepare, tmp_path, capsys):
    text = "a\x1b]0;title\x07b\x9b31mc\r\x7fd\te\nf \u200dg"
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": text}))
    made = prepare(tmp_path / "bad.jsonl", output=tmp_path / "bad", split="1,0,0")[0]
    for asked in ((), ("--doc", "0")):
        assert shoal("dataset", "show", made.path, *asked) == 0
        said = capsys.readouterr().out
        assert "a\ufffd]0;title\ufffdb\ufffd31mc\ufffd\ufffdd\te\nf \u200dg" in said


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "tokenizer.json", "manifest.json", "."])
def test_a_dataset_that_cannot_be_read_is_named_beside_the_others(corpus, name, tmp_path, capsys):
    shutil.copytree(corpus.path, tmp_path / "sets/other")
    locked = corpus.path / name
    mode = locked.stat().st_mode
    locked.chmod(0)
    try:
        with permissions_count():
            assert shoal("dataset", "ls", tmp_path / "sets", "--json", tmp_path / "ls.json") == 0
            assert shoal("dataset", "verify", tmp_path / "sets") == 1
            for command in ("verify", "ls"):  # of one alone
                with suppress(UnreadableError):
                    shoal("dataset", command, corpus.path)
            with pytest.raises(UnreadableError, match=r"cannot be read: Permission denied \(EACCES\)"):
                open_dataset(corpus.path)
    finally:
        locked.chmod(mode)
    mine, other = json.loads((tmp_path / "ls.json").read_text())["datasets"]
    assert (mine["path"], other["problem"]) == (str(corpus.path), "")
    assert "cannot be read: Permission denied" in mine["problem"]
    assert f"{tmp_path}/sets/other: good" in capsys.readouterr().out
    assert shoal("dataset", "verify", tmp_path / "sets") == 0


def test_a_document_whose_source_was_not_recorded_is_shown_all_the_same(corpus, tmp_path):
    record = corpus.path / "stages/parse.json"
    asked = ("dataset", "show", corpus.path, "--doc", 0, "--json", tmp_path / "doc.json")
    record.write_text("{}")
    with pytest.raises(DataError, match=r"parse.json has a missing or invalid entry: 'files'"):
        shoal(*asked)
    record.unlink()
    assert shoal(*asked) == 0
    assert json.loads((tmp_path / "doc.json").read_text())["document"]["from"].startswith("an unknown file")


def test_labelled_examples_are_datasets_too(tmp_path, capsys):
    np.savez(
        tmp_path / "in.npz", x=np.zeros((40, 4), np.uint8) + np.arange(4, dtype=np.uint8), y=np.arange(40) % 2
    )
    shoal("prepare", tmp_path / "in.npz", "--output", tmp_path / "set", "--split", "8,1,1")
    assert shoal("dataset", "verify", tmp_path / "set") == 0
    assert shoal("dataset", "show", tmp_path / "set") == 0
    assert "32 examples" in capsys.readouterr().out
    with pytest.raises(InputError, match="holds no text"):
        shoal("dataset", "show", tmp_path / "set", "--doc", "0")
    flip(tmp_path / "set/train.inputs.npy")
    assert shoal("dataset", "verify", tmp_path / "set") == 1


def test_what_is_not_there_is_a_sentence(corpus, tmp_path):
    with pytest.raises(InputError, match="is not a folder"):
        shoal("dataset", "ls", tmp_path / "nosuch")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no dataset"):
        shoal("dataset", "verify", tmp_path / "empty")
    count = open_dataset(corpus.path).split("train").num_documents
    for wrong in (-1, count):
        with pytest.raises(InputError, match=f"split train of .* has {count} documents"):
            shoal("dataset", "show", corpus.path, "--doc", wrong)
