"""`prepare` from end to end, in the test's own process."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from shoal.data.dataset import verify_dataset
from shoal.data.indexed import IndexedReader
from shoal.data.prepare import run, vocabulary
from shoal.data.prepare.engine import Engine
from shoal.data.prepare.options import PrepareOptions
from shoal.data.tokenizer import load_tokenizer
from shoal.errors import DataError, InputError, ShoalError

WORDS = ["time", "day", "world", "life", "hand", "part", "child", "eye", "woman", "place", "work", "week"]


def story(seed, sentences=30):
    draw = random.Random(seed)
    return " ".join(" ".join(draw.choices(WORDS, k=8)).capitalize() + "." for _ in range(sentences))


@pytest.fixture
def corpus(tmp_path):
    """600 documents in three kinds of files, some of them broken or empty."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    with (folder / "a.jsonl").open("w") as file:
        for n in range(400):
            file.write(json.dumps({"text": story(n, 3)}) + "\n")
            if n in (5, 300):
                file.write("{broken\n\n")
        file.write('{"text": ""}\n')
    (folder / "b.csv").write_text("text\n" + "\n".join(story(n, 2) for n in range(500, 698)) + "\n")
    (folder / "c.txt").write_text(story(1000, 200))
    (folder / "d.txt").write_text(story(1001, 10))
    return folder


def content(folder):
    """Return {name: bytes} of everything in a dataset."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_document_is_in_just_one_split(prepare, corpus, documents_of):
    dataset, _ = prepare(corpus, split="90,9,1")
    verify_dataset(dataset.path)
    found = [text for name in ("train", "validation", "test") for text in documents_of(dataset, name)]
    expected = [story(n, 3) for n in range(400)] + [story(n, 2) for n in range(500, 698)]
    expected += [story(1000, 200), story(1001, 10)]
    assert sorted(found) == sorted(expected)
    assert [dataset.split(name).num_documents for name in ("train", "validation", "test")] == [540, 54, 6]


def test_the_order_within_a_split_is_that_of_the_sources(prepare, corpus, documents_of):
    found = documents_of(prepare(corpus, split="1")[0])
    assert found[:3] == [story(0, 3), story(1, 3), story(2, 3)]
    assert found[-1] == story(1001, 10)


def test_counters_sum_and_rejects_say_file_line_and_reason(prepare, corpus):
    dataset, text = prepare(corpus, range_bytes=3000)
    counters = dataset.manifest["counters"]
    assert counters["documents_read"] == 603
    parts = ("documents_kept", "rejected", "empty", "filtered", "duplicates")
    assert [counters[name] for name in parts] == [600, 2, 1, 0, 0]
    lines = [json.loads(line) for line in (dataset.path / "rejects" / "rejects.jsonl").open()]
    assert [(Path(line["file"]).name, line["line"]) for line in lines] == [("a.jsonl", 7), ("a.jsonl", 304)]
    data = (corpus / "a.jsonl").read_bytes()
    assert all(data[line["offset"] :].startswith(b"{broken") for line in lines)
    assert "not JSON" in lines[0]["reason"]
    assert "rejected 2, empty 1, filtered 0, duplicates 0" in text
    assert sum(split["tokens"] for split in dataset.manifest["splits"].values()) == counters["tokens"]
    assert sum(p.stat().st_size for p in corpus.iterdir()) == counters["bytes_read"]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_bytes_do_not_depend_on_the_size_of_ranges(prepare, corpus, tmp_path, tokenizer):
    options = {"tokenizer": tokenizer, "vocab_size": 300 if tokenizer == "bpe" else None}
    made = [
        content(prepare(corpus, output=tmp_path / f"d{size}", range_bytes=size, **options)[0].path)
        for size in (500, 7000, 1 << 20)
    ]
    assert made[0] == made[1] == made[2]
    assert set(made[0]) == {
        *(f"{split}.{kind}" for split in ("train", "validation", "test") for kind in ("bin", "idx")),
        *("manifest.json", "tokenizer.json", "rejects/rejects.jsonl"),
        *(f"stages/{stage}.json" for stage in ("parse", "tokenise", "split")),
    }


@pytest.mark.parametrize("documents", [3, 10, 100, 999, 3000])
def test_any_number_of_documents_gives_three_splits(prepare, tmp_path, documents):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " + "x" * 700}) + "\n" for n in range(documents)))
    dataset, text = prepare(path)
    sizes = [dataset.split(name).num_tokens for name in ("train", "validation", "test")]
    assert min(sizes) > 0
    assert sum(sizes) == dataset.manifest["counters"]["tokens"]
    assert ("too few documents" in text) == (documents < 500)


def test_a_split_by_tokens_is_the_stream_cut_in_three(prepare, tmp_path, documents_of):
    (tmp_path / "in.txt").write_text(story(1, 100))
    dataset, _ = prepare(tmp_path / "in.txt", split="8,1,1", range_bytes=900)
    parts = {name: documents_of(dataset, name) for name in ("train", "validation", "test")}
    middle = parts["validation"] + parts["test"]
    before, after = [*parts["train"], ""][:2]
    assert before + "".join(middle) + after == story(1, 100)


def test_too_little_text_says_what_it_takes(prepare, tmp_path):
    (tmp_path / "in.txt").write_text("short")
    with pytest.raises(DataError, match=r"with 1 document and 6 tokens gives train 6, validation 0, test 0"):
        prepare(tmp_path / "in.txt")


def test_separate_files_become_splits(prepare, corpus, tmp_path, documents_of):
    (tmp_path / "v.txt").write_text("valid words")
    (tmp_path / "t.txt").write_text("test words")
    dataset, _ = prepare(corpus, validation=(str(tmp_path / "v.txt"),), test=(str(tmp_path / "t.txt"),))
    assert documents_of(dataset, "validation") == ["valid words"]
    assert documents_of(dataset, "test") == ["test words"]
    assert dataset.split("train").num_documents == 600


def test_a_limit_takes_the_first_documents(prepare, corpus, documents_of):
    dataset, _ = prepare(corpus, limit=5, split="1")
    assert documents_of(dataset) == [story(n, 3) for n in range(5)]


def test_the_tokens_are_the_tokenizers_and_an_end_follows_each_document(prepare, corpus):
    dataset, _ = prepare(corpus, tokenizer="bpe", vocab_size=400, split="1")
    tokenizer, reader = load_tokenizer(dataset.path), IndexedReader(dataset.path / "train")
    assert dataset.vocab_size == tokenizer.vocab_size <= 400
    for n in (0, 399, 598):
        ids = reader.document(n).tolist()
        assert ids == [*tokenizer.encode(tokenizer.decode(ids[:-1])), dataset.eod_id]


def test_a_vocabulary_that_the_text_cannot_fill_is_said(prepare, corpus):
    dataset, text = prepare(corpus, tokenizer="bpe", vocab_size=5000)
    assert f"the text gives only {dataset.vocab_size:,} ids: fewer than 5,000" in text


def test_training_a_bpe_is_repeatable_and_bounded(corpus, tmp_path, monkeypatch):
    sources, _ = run.find_sources(PrepareOptions((str(corpus),), tmp_path))
    form = vocabulary.Format("text", None, None, None)
    options = PrepareOptions((str(corpus),), tmp_path, vocab_size=400)
    text = vocabulary.SourceText(sources, form, 1234, None)
    trained = [vocabulary.make_vocabulary(options, text, print) for _ in range(2)]
    assert trained[0] == trained[1]
    monkeypatch.setattr(vocabulary, "SAMPLE_RANGE", 1000)

    def size(seed):
        batches = list(vocabulary.SourceText(sources, form, seed, None).sample(5000))
        return sum(len(text) for texts in batches for text in texts), batches[0][0]

    assert 5000 <= size(1)[0] < 30_000
    assert size(1) == size(1) != size(2)


def test_the_command_takes_several_suffixes(monkeypatch):
    from shoal.cli.app import app

    asked = []
    monkeypatch.setattr(run, "prepare_command", lambda options, json_path: asked.append(options))
    app(
        ["prepare", "docs", "src", "--ext", "py", ".MD", "--output", "out", "--tokenizer", "char"],
        result_action="return_value",
    )
    assert [(o.inputs, o.ext, o.tokenizer) for o in asked] == [(("docs", "src"), ("py", "md"), "char")]


def test_what_folders_hold_beside_the_text_is_said(prepare, corpus):
    (corpus / "e.png").write_text("x")
    (corpus / ".git").mkdir()
    assert "passed over in folders: 1 .png file, 1 hidden folder" in prepare(corpus)[1]


# --- again ---


def test_again_unchanged_does_nothing_and_says_so(prepare, corpus):
    dataset, _ = prepare(corpus)
    before = {path: path.stat().st_mtime_ns for path in dataset.path.rglob("*")}
    again, text = prepare(corpus, max_rejected_share=0.5, workers=1)
    assert "is up to date: same inputs, same options; nothing to do" in text
    assert again.fingerprint == dataset.fingerprint
    assert before == {path: path.stat().st_mtime_ns for path in dataset.path.rglob("*")}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": 2}, "seed was 1234, now 2"),
        ({"tokenizer": "bpe"}, "tokenizer was bytes, now bpe"),
        ({"split": "9,1"}, "split was 949,50,1, now 9,1"),
    ],
)
def test_a_finished_dataset_is_not_replaced(prepare, corpus, options, text):
    prepare(corpus)
    with pytest.raises(InputError, match=f"already holds a dataset made with other options: {text}"):
        prepare(corpus, **options)


def test_changed_text_is_noticed(prepare, corpus):
    prepare(corpus)
    with (corpus / "d.txt").open("a") as file:
        file.write("more")
    with pytest.raises(InputError, match=r"main files were 4 with [\d,]+ bytes, now 4 with [\d,]+"):
        prepare(corpus)


def test_an_interrupted_run_continues_and_gives_the_same_bytes(prepare, corpus, tmp_path, monkeypatch):
    whole = content(prepare(corpus, output=tmp_path / "whole", range_bytes=2000)[0].path)
    original = Engine.run

    def failing(*work):
        for n, summary in enumerate(original(*work)):
            if n == 5:
                raise KeyboardInterrupt("SIGINT")
            yield summary

    monkeypatch.setattr(Engine, "run", failing)
    with pytest.raises(ShoalError, match="stopped by SIGINT; what is done is kept") as error:
        prepare(corpus, range_bytes=2000)
    assert error.value.exit_code == 75
    assert [p.name for p in (tmp_path / "dataset").iterdir()] == [".work"]
    monkeypatch.setattr(Engine, "run", original)
    dataset, text = prepare(corpus)
    assert re.search(r"continuing: 6 of \d+ ranges were done before", text)
    assert content(dataset.path) == whole


def test_unfinished_work_on_other_options_is_dropped_not_mixed(prepare, corpus, tmp_path, monkeypatch):
    original = Engine.run
    monkeypatch.setattr(run, "assemble", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(corpus, text_key="text", range_bytes=2000)
    monkeypatch.undo()
    monkeypatch.setattr(Engine, "run", original)
    dataset, text = prepare(corpus, seed=9)
    assert "inputs or options changed: the work begun in" in text
    assert "continuing" not in text
    assert content(dataset.path) == content(prepare(corpus, seed=9, output=tmp_path / "fresh")[0].path)


def test_a_kill_between_two_renames_is_mended(prepare, corpus, tmp_path, monkeypatch):
    whole = content(prepare(corpus, output=tmp_path / "whole")[0].path)
    monkeypatch.setattr(
        run, "write_json", lambda path, value: 1 / 0 if path.name == "manifest.json" else real(path, value)
    )
    real = __import__("shoal.runtime.files", fromlist=["write_json"]).write_json
    with pytest.raises(ZeroDivisionError):
        prepare(corpus)
    monkeypatch.setattr(run, "write_json", real)
    assert content(prepare(corpus)[0].path) == whole


@pytest.mark.parametrize("change", ["written to", "removed"])
def test_text_that_changes_while_it_is_read_is_refused(prepare, corpus, tmp_path, monkeypatch, change):
    original = Engine.run

    def meddling(*work):
        yield from original(*work)
        (corpus / "d.txt").write_text("new") if change == "written to" else (corpus / "d.txt").unlink()

    monkeypatch.setattr(Engine, "run", meddling)
    with pytest.raises(DataError, match=rf"d\.txt was {change} while it was read"):
        prepare(corpus)
    monkeypatch.setattr(Engine, "run", original)
    prepare(corpus)


def test_a_kill_after_the_manifest_leaves_nothing_for_ever(prepare, corpus):
    dataset, _ = prepare(corpus)
    (dataset.path / ".work" / "abc").mkdir(parents=True)
    prepare(corpus)
    assert not (dataset.path / ".work").exists()


def test_a_file_name_that_is_not_utf8_is_only_a_name(prepare, corpus, documents_of):
    for name, text in ((b"z\xff.txt", b"the last"), (b"z\xfe.txt", b"\xff")):
        with open(os.path.join(os.fsencode(corpus), name), "wb") as file:
            file.write(text)
    dataset, _ = prepare(corpus, split="1")
    assert documents_of(dataset)[-1] == "the last"
    assert (
        "z" in json.loads((dataset.path / "rejects" / "rejects.jsonl").read_text().splitlines()[-1])["file"]
    )


# --- bad input ---


def test_too_many_broken_lines_stop_and_are_listed(prepare, corpus, tmp_path):
    with pytest.raises(DataError, match=r"2 of 602 documents are refused \(0\.3%\), more than") as error:
        prepare(corpus, max_rejected_share=0.001)
    assert "a.jsonl line 7: not JSON" in error.value.message
    assert not (tmp_path / "dataset" / "manifest.json").exists()
    listed = tmp_path / "dataset" / "rejects" / "rejects.jsonl"
    assert str(listed) in error.value.hint
    assert len(listed.read_text().splitlines()) == 2
    _, text = prepare(corpus, max_rejected_share=0.01)
    assert "continuing" in text


def test_a_text_file_that_is_not_utf8_is_refused_by_name(prepare, tmp_path):
    (tmp_path / "a.txt").write_bytes("früh".encode("latin-1"))
    with pytest.raises(
        DataError, match=r"1 of 1 documents are refused .*a\.txt line 1: not UTF-8: byte 0xfc"
    ):
        prepare(tmp_path / "a.txt")


def test_only_empty_documents_is_a_sentence(prepare, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"there is no text in .*a\.jsonl"):
        prepare(tmp_path / "a.jsonl")


def test_a_wrong_text_key_is_told_before_any_work(prepare, corpus, tmp_path):
    with pytest.raises(DataError, match="no key 'body'; keys seen: 'text'") as error:
        prepare(corpus, text_key="body")
    assert "--text-key" in error.value.hint
    assert not (tmp_path / "dataset").exists()


def test_a_tokenizer_that_loses_the_text_is_refused(prepare, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    built = Tokenizer(
        models.WordLevel({"[UNK]": 0, "</s>": 1, **{w: n + 2 for n, w in enumerate(WORDS)}}, "[UNK]")
    )
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.add_special_tokens(["[UNK]", "</s>"])
    built.save(str(tmp_path / "words.json"))
    (tmp_path / "in.txt").write_text("Ganz andere Woerter stehen hier. " * 50)
    with pytest.raises(DataError, match=r"words\.json does not fit this text: \d+% of it is lost"):
        prepare(tmp_path / "in.txt", tokenizer=str(tmp_path / "words.json"))
    (tmp_path / "fits.txt").write_text(" ".join(WORDS * 40))
    prepare(tmp_path / "fits.txt", tokenizer=str(tmp_path / "words.json"), split="9,1")


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [("nosuch", "is neither a file nor one of bpe, char, word, gpt2, bytes"), (".", "holds no tokenizer")],
)
def test_a_tokenizer_that_is_not_there_is_a_sentence(prepare, corpus, tmp_path, tokenizer, text):
    choice = str(tmp_path) if tokenizer == "." else tokenizer
    with pytest.raises(ShoalError, match=text):
        prepare(corpus, tokenizer=choice)


def test_a_folder_that_holds_other_things_is_left_alone(prepare, corpus, tmp_path):
    with pytest.raises(InputError, match=r"is not empty: it holds a\.jsonl"):
        prepare(corpus, output=corpus)
    assert len(list(corpus.iterdir())) == 4


def test_a_place_that_cannot_be_written_is_a_sentence(prepare, corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShoalError, match=r"cannot write|cannot be written"):
        prepare(corpus, output=tmp_path / "file" / "dataset")
    if Path("/proc/version").exists():
        with pytest.raises(ShoalError, match=r"cannot write|cannot be written"):
            prepare(corpus, output=Path("/proc/nosuch/dataset"))


def test_two_at_once_on_one_folder_are_refused(prepare, corpus, tmp_path, in_process):
    with (
        run._locked(tmp_path / "dataset"),
        pytest.raises(InputError, match="another `shoal prepare` is writing"),
    ):
        prepare(corpus)


def test_a_full_disk_is_a_sentence_and_the_work_goes_on_elsewhere(prepare, corpus, small_disk, tmp_path):
    with (corpus / "big.txt").open("w") as file:
        file.write(story(5, 30_000))
    output = small_disk / "dataset"
    with pytest.raises(ShoalError, match="the disk is full: cannot write") as error:
        prepare(corpus, output=output)
    assert "run the same command again" in error.value.hint
    assert [p.name for p in output.iterdir()] == [".work"]
    shutil.move(output, tmp_path / "moved")
    prepare(corpus, output=tmp_path / "moved")


def test_a_command_planted_in_any_file_is_not_run(prepare, corpus, tmp_path, monkeypatch):
    """Pickles, templates and file names with commands in them: nothing of it may happen."""
    monkeypatch.chdir(tmp_path)
    planted = tmp_path / "planted"
    pickle = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + bytes([7 + len(str(planted))])
    pickle += b"touch " + str(planted).encode() + b" \x85R."
    dataset, _ = prepare(corpus)
    for name in ("tokenizer.json", "manifest.json", "train.idx", "train.bin"):
        copy = tmp_path / f"copy-{name}"
        shutil.copytree(dataset.path, copy)
        (copy / name).write_bytes(pickle)
        for use in (verify_dataset, load_tokenizer):
            if use is verify_dataset or name == "tokenizer.json":
                with pytest.raises(ShoalError):
                    use(copy)
    evil = json.loads((dataset.path / "tokenizer.json").read_text())
    evil["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": f"$(touch {planted})"}, "behavior": "x"}
    evil["auto_map"] = {"AutoTokenizer": ["evil.py", None]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(evil))
    (tmp_path / "evil.py").write_text(f"open({str(planted)!r}, 'w')")
    with pytest.raises(DataError):
        load_tokenizer(tmp_path / "tokenizer.json")
    (corpus / f"x$(touch {os.path.basename(planted)});.txt").write_text(
        "__import__('os').system('touch planted')"
    )
    prepare(corpus, output=tmp_path / "again")
    assert not planted.exists()


def test_a_quiet_console_is_enough(in_process, corpus, tmp_path):
    dataset = run.prepare(PrepareOptions((str(corpus),), tmp_path / "d", "bytes"), Console(quiet=True))
    assert dataset.split("train").num_documents > 500
