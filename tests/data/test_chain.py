"""Preparations by a chain of stages, in the test's own process: what is dropped, counted, kept and told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from shoal.cli.app import app
from shoal.data.commands import document_of
from shoal.data.dataset import SPLITS
from shoal.data.indexed import IndexedReader
from shoal.data.prepare.chain import STAGES, read_chain, stage_class
from shoal.data.prepare.options import PrepareOptions
from shoal.data.tokenizer import load_tokenizer
from shoal.errors import ConfigError, DataError, InputError
from tests.cases import every
from tests.data import corpus as planted


@pytest.fixture
def corpus(tmp_path):
    return planted.write(tmp_path / "corpus")


@pytest.fixture
def run(prepare, corpus):
    """Return run(option=value) -> (dataset, what was printed), with the stages of the corpus."""

    def call(*inputs, **options):
        chosen = {"stages": corpus / "stages.toml", "split": "8,1,1", **options}
        return prepare(*(inputs or [corpus / "a.jsonl"]), **chosen)

    return call


def table_of(dataset):
    return pq.read_table(dataset.path / "stages/documents.parquet").to_pylist()


def kept_text(dataset, row):
    """Return the text of a kept document by what the table says about its place."""
    reader = IndexedReader(dataset.path / SPLITS[row["split"]])
    return load_tokenizer(dataset.path).decode(reader.document(row["position"])[:-1])


# --- what becomes of documents ---


def test_each_planted_document_ends_where_it_should_and_the_counts_add_up(run):
    dataset, printed = run()
    rows = table_of(dataset)
    made = list(planted.texts(400))
    by_url = {row["url"]: row for row in rows}
    fates = [by_url[f"https://example.com/{n}"] for n in range(len(made))]
    expected = {"fresh": None, "short": "length", "equal": "exact", "near": "near", "contaminated": None}
    for (text, kind), fate in zip(made, fates, strict=True):
        assert fate["stage"] == expected[kind], (kind, fate)
        if kind == "fresh":
            assert kept_text(dataset, fate) == text
        if kind == "contaminated":
            assert planted.PASSAGE not in kept_text(dataset, fate)
        if kind in ("equal", "near"):
            twin = rows[fate["twin"]]
            assert twin["number"] < fate["number"]
            assert rows[fate["survivor"]]["stage"] is None
            assert twin["stage"] or twin["cluster"] == fate["cluster"] > 1
            assert fate["exact"] == 1.0 if kind == "equal" else 0.9 < fate["exact"] < 1.0
    counted = Counter(kind for _, kind in made)
    counters = dataset.manifest["counters"]
    assert counters["documents_read"] == len(rows) == 403
    assert counters["rejected"] == 3
    assert counters["filtered"] == counted["short"]
    assert counters["duplicates"] == counted["equal"] + counted["near"]
    assert counters["documents_kept"] == counted["fresh"] + counted["contaminated"]
    lineage = {record["stage"]: record for record in dataset.manifest["lineage"]}
    assert list(lineage) == [
        "parse",
        "read",
        "repair",
        "length",
        "dedup",
        "decontaminate",
        "tokenise",
        "split",
    ]
    assert lineage["length"]["counters"]["reasons"] == {"too short": counted["short"]}
    assert lineage["dedup"]["counters"]["documents"] == 400 - counted["short"]
    assert lineage["dedup"]["settings"]["threshold"] == 0.8
    samples = json.loads((dataset.path / "stages/samples.json").read_text())
    short = [n for n, (_, kind) in enumerate(made) if kind == "short"][:3]
    assert [one["text"] for one in samples["length: too short"]] == [made[n][0] for n in short]
    assert "rejected 3" in printed
    lines = (dataset.path / "rejects/rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in lines] == [2, 153, 304]


def test_n_grams_that_are_common_in_all_of_the_text_are_left_in(run, corpus):
    stages = (corpus / "stages.toml").read_text().replace("max_count = 1000", "max_count = 10")
    (corpus / "stages.toml").write_text(stages)
    dataset, _ = run(range_bytes=20_000)  # in none of the ranges by itself
    rows = {row["url"]: row for row in table_of(dataset)}
    made = [kind for _, kind in planted.texts(400)]
    assert made.count("contaminated") > 10
    for n in [n for n, kind in enumerate(made) if kind == "contaminated"]:
        assert planted.PASSAGE in kept_text(dataset, rows[f"https://example.com/{n}"])


@pytest.mark.parametrize(
    ("tokenizer", "range_bytes"), every(3, [("bpe", 50_000), ("bytes", 20_000), ("bytes", 1_000_000)])
)
def test_the_bytes_do_not_depend_on_the_ranges(run, tmp_path, range_bytes, tokenizer):
    size = {"vocab_size": 400} if tokenizer == "bpe" else {}
    whole = run(output=tmp_path / "whole", tokenizer=tokenizer, range_bytes=300_000, **size)[0]
    other = run(output=tmp_path / "other", tokenizer=tokenizer, range_bytes=range_bytes, **size)[0]
    assert planted.content(other.path) == planted.content(whole.path)


def test_files_for_other_splits_go_through_the_chain_too(run, corpus, tmp_path):
    text = next(planted.texts(1, seed=9))[0]
    (corpus / "v.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}) + "\n")
    copy = json.loads((corpus / "a.jsonl").read_text().splitlines()[0])
    with (corpus / "v.jsonl").open("a") as file:
        file.write(json.dumps(copy) + "\n")
    dataset, _ = run(validation=(str(corpus / "v.jsonl"),))
    rows = table_of(dataset)[-3:]
    assert [row["stage"] for row in rows] == [None, "length", "exact"]
    assert (rows[0]["split"], rows[0]["position"], kept_text(dataset, rows[0])) == (1, 0, text)


def test_the_first_documents_are_used_with_a_limit(run):
    dataset, _ = run(limit=50)
    assert dataset.manifest["counters"]["documents_read"] == 51  # and a broken line


@pytest.mark.parametrize("range_bytes", [20_000, 300_000])
def test_a_limit_counts_pages_and_texts_alike_for_any_ranges(prepare, corpus, tmp_path, range_bytes):
    """A document that is dropped when it is read does not count."""
    for n in range(5):
        page = f"<html><body><article>{('<p>' + 'word ' * 40 + f'{n}</p>') * 5}</article></body></html>"
        (corpus / f"b{n}.html").write_text(page if n != 2 else " ")
    (tmp_path / "s.toml").write_text('[extract]\nengine = "resiliparse"\n')
    dataset, _ = prepare(corpus, stages=tmp_path / "s.toml", limit=404, split="1", range_bytes=range_bytes)
    counters = dataset.manifest["counters"]
    assert (counters["documents_kept"], counters["filtered"], counters["rejected"]) == (404, 1, 3)


def test_pages_are_read_as_text_without_the_stage_that_extracts_them(run, corpus):
    (corpus / "p.html").write_text("<p>" + "some text " * 60 + "</p>")
    dataset, _ = run(corpus / "p.html", split="1")
    rows = table_of(dataset)
    assert [row["stage"] for row in rows] == [None]
    assert kept_text(dataset, rows[0]).startswith("<p>some text")


@pytest.mark.parametrize("stages", [True, False])
def test_a_shuffle_moves_documents_and_the_records_follow(run, prepare, corpus, tmp_path, stages):
    def make(name, **options):
        if stages:
            return run(output=tmp_path / name, **options)[0]
        return prepare(corpus / "a.jsonl", output=tmp_path / name, split="8,1,1", **options)[0]

    plain, shuffled = make("plain"), make("shuffled", shuffle=True)
    for name in ("train", "validation"):
        before, after = (
            [bytes(reader.document(n)) for n in range(reader.num_documents)]
            for reader in (IndexedReader(dataset.path / name) for dataset in (plain, shuffled))
        )
        assert sorted(before) == sorted(after)
        assert before != after
        place = before.index(after[3])
        assert document_of(shuffled, name, 3, 9)["from"] == document_of(plain, name, place, 9)["from"]
    if stages:
        made = list(planted.texts(400))
        for row in table_of(shuffled):
            if row["stage"] is None and made[int(row["url"].rpartition("/")[2])][1] == "fresh":
                assert kept_text(shuffled, row) == made[int(row["url"].rpartition("/")[2])][0]


def test_a_split_by_tokens_gives_no_places(run):
    dataset, _ = run(limit=20, split="949,50,1")
    rows = table_of(dataset)
    assert dataset.manifest["split"]["by"] == "tokens"
    assert {row["split"] for row in rows} == {None}


# --- continuing ---


def test_the_same_command_again_has_nothing_to_do_and_another_chain_is_refused(run, corpus):
    run()
    assert "up to date" in run()[1]
    (corpus / "evaluation.txt").write_text("something else entirely " * 9)
    with pytest.raises(InputError, match="made with other options: stage_files was"):
        run()


def test_a_dataset_with_stages_is_not_that_without(run, prepare, corpus):
    run()
    with pytest.raises(InputError, match=r"stages was .*, now None"):
        prepare(corpus / "a.jsonl", split="8,1,1")


# --- nothing left ---


def test_where_nothing_is_left_the_main_reason_is_told(run, corpus):
    (corpus / "stages.toml").write_text('[length]\ntokenizer = "estimate"\nmin_tokens = 5000\n')
    with pytest.raises(
        DataError, match=r"no document is left of 403: length dropped 400, 400 of them .*short"
    ):
        run()


def test_a_stage_that_drops_nearly_all_is_reported(run, corpus):
    (corpus / "stages.toml").write_text('[length]\ntokenizer = "estimate"\nmin_tokens = 240\n')
    dataset, printed = run(split="1")
    assert 0 < dataset.manifest["counters"]["documents_kept"] < 40
    assert "warning: length dropped " in printed
    assert "because of: too short" in printed


# --- a TOML of stages ---


@pytest.mark.parametrize(
    ("toml", "said", "hint"),
    [
        ("[lenght]", "there is no stage 'lenght'", "did you mean 'length'"),
        ("[length]\nmin_token = 3", "length has no setting 'min_token'", "did you mean 'min_tokens'"),
        ("[length]\nmin_tokens = -1", "length.min_tokens = -1: Input should be greater", "Minimum number"),
        ("length = 3", "length is not a table", r"write \[length\]"),
        ("[length]\n[extract]", "extract comes after length", r"put \[extract\] before"),
        ("[length", "is not TOML", "--show-stages"),
        ("[decontaminate]", "decontaminate.files = ", "Evaluation files"),
        ("[length]\n# no [quality]", "has no stage quality, whose kind is given", r"add \[quality\]"),
        ("quality = 5", "quality is not a table", r"write \[quality\]"),
    ],
)
def test_a_bad_chain_is_a_sentence(tmp_path, toml, said, hint):
    (tmp_path / "my.toml").write_text(toml)
    with pytest.raises(ConfigError, match=said) as error:
        read_chain(tmp_path / "my.toml", {"quality": {"kind": "code"}} if "quality" in toml else {})
    assert "my.toml" in error.value.message
    assert __import__("re").search(hint, error.value.hint)


def test_a_kind_is_for_the_stages_that_are_there_and_languages_add_theirs(tmp_path):
    (tmp_path / "my.toml").write_text("[quality]")
    kind = {"language": {"kind": "code"}, "quality": {"kind": "code"}}
    assert list(read_chain(tmp_path / "my.toml", kind).stages) == ["quality"]
    kept = read_chain(tmp_path / "my.toml", {"language": {"keep": ["en"]}})
    assert list(kept.stages) == ["quality", "language"]


def test_the_order_of_the_tables_is_that_of_the_stages(tmp_path):
    (tmp_path / "my.toml").write_text("[dedup]\n[quality]\n[urls]\n[length]\n")
    chain = read_chain(tmp_path / "my.toml", {"quality": {"kind": "code"}})
    assert list(chain.stages) == ["urls", "quality", "length", "dedup"]
    assert chain.to_dict()["quality"]["kind"] == "code"


def test_every_stage_has_its_name_and_documents_its_settings():
    for name in STAGES:
        kind = stage_class(name)
        assert kind.name == name
        assert all(field.description for field in kind.model_fields.values()), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": ()}, "there is no input"),
        ({"web": True, "stages": Path("a.toml")}, "--web is a chain of stages, and --stages names another"),
        ({"changes": {"language": {"keep": ["en"]}}}, "--languages is for a chain of stages"),
        ({"max_memory": "5 apples", "web": True}, "--max-memory '5 apples' is no size"),
        ({"max_memory": "1kB", "web": True}, "--max-memory '1kB' is no size of at least"),
        ({"urls": ("a.txt",), "limit": 3}, "--limit counts documents of files"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        PrepareOptions(**{"inputs": ("a",), "output": Path("d"), **options})


def test_memory_is_given_with_a_unit():
    sizes = [
        PrepareOptions(("a",), Path("d"), max_memory=text).memory_bytes for text in ("2GB", "1.5g", "300M")
    ]
    assert sizes == [2_000_000_000, 1_500_000_000, 300_000_000]


@pytest.mark.parametrize(
    ("stages", "options", "said"),
    [
        ("[length]", {"tokenizer": "gtp2"}, "--tokenizer gtp2 is neither a file nor one of"),
        ('[decontaminate]\nfiles = ["gone.txt"]', {}, "gone.txt cannot be read"),
        ('[dedup]\nagainst = ["gone"]', {}, "gone"),
        ("[length]", {"urls": ("a.txt",)}, r"--urls gives pages, and .* has no \[extract\]"),
    ],
)
def test_what_cannot_work_is_told_before_the_work(run, corpus, monkeypatch, stages, options, said):
    (corpus / "stages.toml").write_text(stages)
    monkeypatch.setattr("shoal.data.prepare.chained.Chained.read", lambda made: pytest.fail("it began"))
    with pytest.raises(InputError, match=said):
        run(**options)


def test_a_report_that_cannot_be_made_keeps_no_dataset_back(run, monkeypatch):
    def fail(*_):
        raise DataError("a damaged table")

    monkeypatch.setattr("shoal.data.prepare.chained.write_report", fail)
    dataset, printed = run()
    assert "no report.html: a damaged table" in printed
    assert not (dataset.path / "report.html").exists()


# --- the commands ---


def test_stages_are_shown_as_a_toml_that_gives_the_same_chain(capsys, tmp_path):
    app(["prepare", "--show-stages", "--web", "--languages", "en"], result_action="return_value")
    printed = capsys.readouterr().out
    assert "\nkeep = [" in printed
    (tmp_path / "shown.toml").write_text(printed)
    again = read_chain(tmp_path / "shown.toml", {})
    assert again == read_chain(None, {"language": {"keep": ["en"]}})


def test_what_stages_dropped_is_shown_and_a_document_explained(run, capsys):
    dataset, _ = run()
    app(["prepare", "--show-stages", "--output", str(dataset.path)], result_action="return_value")
    printed = capsys.readouterr().out
    assert "too short" in printed
    near = next(row for row in table_of(dataset) if row["stage"] == "near")
    app(["explain", str(dataset.path), near["url"]], result_action="return_value")
    printed = capsys.readouterr().out
    assert "dropped by near: similar to an earlier document" in printed
    assert f"to document {near['twin']:,}" in printed


def test_output_is_asked_for(capsys):
    with pytest.raises(InputError, match="--output is missing"):
        app(["prepare", "a.txt"], result_action="return_value", exit_on_error=False)


def test_ids_of_the_table_are_dense(run):
    numbers = [row["number"] for row in table_of(run()[0])]
    assert np.array_equal(numbers, np.arange(403))
