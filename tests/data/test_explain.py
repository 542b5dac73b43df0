"""`shoal explain`: why a document was dropped, and where a kept one lies."""

from __future__ import annotations

import json

import pytest

from shoal.data.dataset import open_dataset
from shoal.data.explain import explain
from shoal.errors import ConfigError, DataError, InputError
from tests.data.documents import dataset_of, decided

ROWS = [
    {"url": "https://a.org/1", "split": 0, "position": 0, "chars": 5, "cluster": 3, "language": "en"},
    {"stage": "length", "reason": "too short", "detail": "3 tokens, fewer than 128", "chars": 9},
    {"stage": "near", "reason": "near-duplicate", "twin": 0, "survivor": 0, "estimated": 0.90625,
     "exact": 0.875, "cluster": 3, "chars": 2345, "language": "en", "url": "https://b.org/\x1b[31m"},
    {"split": 1, "position": 0, "chars": 900, "detail": "1 piece removed"},
    {"split": 0, "position": 1, "chars": 7},
    {"stage": "exact", "reason": "duplicate", "twin": 1, "survivor": 4, "chars": 9},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    texts = {"train": ["hello", "second\x1b"], "validation": ["天" * 900]}
    return dataset_of(tmp_path / "set", decided(ROWS), **texts)


@pytest.fixture
def say(folder, capsys):
    def call(doc):
        assert explain(folder, doc) == 0
        return capsys.readouterr().out.splitlines()

    return call


def test_a_kept_document_is_told_with_its_place_and_text(say, folder):
    assert say("https://a.org/1") == [
        "document 0: web/a.jsonl:0 (https://a.org/1)",
        "kept",
        "in a cluster of 3 near-duplicates",
        "text: 5 characters, en",
        "train document 0: 6 tokens from token 0 (byte 0) of train.bin",
        "hello",
    ]
    assert say("4")[-2:] == [
        "train document 1: 8 tokens from token 6 (byte 12) of train.bin",
        "second\ufffd",  # no control characters reach a terminal
    ]
    split = open_dataset(folder).split("train")
    assert bytes(split.tokens[6:13].astype("u1")) == b"second\x1b"


def test_the_first_300_characters_are_shown_and_what_was_removed(say):
    lines = say("a.jsonl:300")
    assert lines[1] == "kept (1 piece removed)"
    assert lines[-1] == "天" * 300


def test_a_dropped_document_is_told_with_stage_reason_and_figures(say):
    assert say("1") == [
        "document 1: web/a.jsonl:100",
        "dropped by length: too short (3 tokens, fewer than 128)",
        "text: 9 characters",
    ]


def test_a_near_duplicate_is_told_with_its_twin(say):
    assert say("2") == [
        "document 2: web/a.jsonl:200 (https://b.org/\ufffd[31m)",
        "dropped by near: near-duplicate",
        "in a cluster of 3 near-duplicates",
        "twin: similarity 0.906 estimated, 0.875 exact, to document 0: web/a.jsonl:0 (https://a.org/1)",
        "text: 2,345 characters, en",
    ]
    assert "twin: document 1: web/a.jsonl:100, dropped by length" in say("5")
    assert "kept of the cluster: document 4: web/a.jsonl:400" in say("5")


def test_json_has_the_facts(folder, tmp_path, capsys):
    explain(folder, "2", tmp_path / "out.json")
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["twin"]["number"] == 0
    assert (facts["stage"], facts["exact"], facts["path"]) == ("near", 0.875, "web/a.jsonl")
    explain(folder, "0", tmp_path / "out.json")
    facts = json.loads((tmp_path / "out.json").read_text())
    assert (facts["split"], facts["tokens"], facts["text"]) == ("train", 6, "hello")


def test_a_place_beyond_the_token_file_is_damage(tmp_path):
    folder = dataset_of(tmp_path / "set", decided([{"split": 0, "position": 4}]), train=["a"])
    with pytest.raises(DataError, match="names document 4 of train, which has 1 document"):
        explain(folder, "0")


def test_without_a_table_kept_documents_are_told_by_their_number(prepare, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    dataset, _ = prepare(tmp_path / "a.jsonl", split="1")
    explain(dataset.path, "1")
    assert capsys.readouterr().out.splitlines() == [
        f"document 1: {tmp_path}/a.jsonl, document 1 of 2 kept",
        "kept",
        "train document 1: 4 tokens from token 4 (byte 8) of train.bin",
        "two",
    ]
    with pytest.raises(InputError, match=r"no table of documents: a.jsonl:0 is not known"):
        explain(dataset.path, "a.jsonl:0")
    with pytest.raises(InputError, match=r"split train of .* has 2 documents"):
        explain(dataset.path, "2")


def test_a_missing_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.delitem(__import__("sys").modules, "shoal.data.prepare.decisions")
    with pytest.raises(ConfigError, match="needs pyarrow"):
        explain(folder, "0")
