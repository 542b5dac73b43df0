"""Tokenizers that are made of the text: characters, words, and a BPE whose size suits the text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shoal.data.indexed import IndexedReader
from shoal.data.prepare import vocabulary
from shoal.data.prepare.options import PrepareOptions
from shoal.data.prepare.vocabulary import default_vocab
from shoal.data.tokenizer import load_tokenizer, parse_tokenizer
from shoal.errors import ConfigError, DataError

TEXT = "To be, or not to be,\n\tthat is the question: 质 🙂\n" * 40


def ids_of(dataset, name="train"):
    reader = IndexedReader(dataset.path / name)
    return [reader.document(n).tolist() for n in range(reader.num_documents)]


# --- characters ---


def test_each_character_of_the_main_text_is_a_token_and_any_other_is_unknown(prepare, tmp_path):
    (tmp_path / "in.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text("Toé<unk>")
    dataset, _ = prepare(
        tmp_path / "in.txt", tokenizer="char", split="1", validation=(str(tmp_path / "other.txt"),)
    )
    chars = sorted(set(TEXT))
    assert dataset.vocab_size == len(chars) + 2
    assert dataset.eod_id == dataset.vocab_size - 1
    id_of = {char: number for number, char in enumerate(chars, start=1)}
    assert ids_of(dataset) == [[*map(id_of.get, TEXT), dataset.eod_id]]
    unknown = [id_of.get(char, 0) for char in "Toé<unk>"]
    assert ids_of(dataset, "validation") == [[*unknown, dataset.eod_id]]
    assert dataset.manifest["tokenizer"]["kind"] == "char"
    tokenizer = load_tokenizer(dataset.path)
    assert tokenizer.decode(ids_of(dataset)[0]) == TEXT
    assert tokenizer.name == "characters"


def test_a_file_of_characters_loads_in_the_tokenizers_library(prepare, tmp_path):
    from tokenizers import Tokenizer

    (tmp_path / "in.txt").write_text(TEXT)
    dataset, _ = prepare(tmp_path / "in.txt", tokenizer="char", split="1")
    library = Tokenizer.from_file(str(dataset.path / "tokenizer.json"))
    assert library.encode(TEXT).ids == ids_of(dataset)[0][:-1]
    assert library.decode(library.encode(TEXT).ids) == TEXT


def test_the_last_rare_character_of_a_long_text_is_found(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "SAMPLE_BYTES", 1000)
    monkeypatch.setattr(vocabulary, "SAMPLE_RANGE", 500)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": c * 400}) + "\n" for c in "abcdefgh"))
    dataset, _ = prepare(tmp_path / "in.jsonl", tokenizer="char", split="1")
    assert dataset.vocab_size == 8 + 2


@pytest.mark.parametrize(
    "change",
    [
        {"fuse_unk": True},
        {"byte_fallback": True},
        {"ignore_merges": True},
        {"unk_token": None},
        {"merges": [["a", "b"]], "vocab": {"<unk>": 0, "a": 1, "b": 2, "ab": 3}},
        {"end_of_word_suffix": "</w>"},
    ],
)
def test_a_bpe_that_may_do_more_than_look_characters_up_is_left_to_the_library(change):
    spec = json.loads(vocabulary.closed_json("ab", words=False))
    spec["model"] |= change
    tokenizer = parse_tokenizer(json.dumps(spec).encode(), "other")
    assert tokenizer.name == "BPE"
    assert tokenizer.cut is None
    reference = tokenizer._backend.reference
    assert tokenizer.encode("abba") == reference.encode("abba").ids


# --- words ---

LINES = " the cat sat on N it\n the dog sat on the it\n the cat <|endoftext|> ran <|endoftext|>\n"


def test_words_are_counted_and_those_seen_once_are_unknown(prepare, tmp_path):
    (tmp_path / "in.txt").write_text(LINES)
    dataset, text = prepare(tmp_path / "in.txt", tokenizer="word", separator="\\n", split="1")
    names = ["<unk>", "the", "cat", "it", "on", "sat", "<|endoftext|>"]
    assert dataset.vocab_size == len(names)
    id_of = {name: number for number, name in enumerate(names)}
    words = [[id_of.get(word, 0) for word in line.split()] for line in LINES.splitlines()]
    words[2][2] = words[2][4] = 0  # the text of a special token is text
    assert ids_of(dataset) == [[*line, dataset.eod_id] for line in words]
    assert load_tokenizer(dataset.path).decode([1, 2, 5, 6]) == "the cat sat"
    assert "of a sample of the text is in words outside the vocabulary: <unk>" in text


def test_a_text_with_unknown_words_of_its_own_keeps_all_others(prepare, tmp_path):
    (tmp_path / "in.txt").write_text(LINES.replace(" it\n", " <unk>\n"))
    dataset, _ = prepare(tmp_path / "in.txt", tokenizer="word", split="1")
    words = ["the", "cat", "on", "sat", "N", "dog", "ran"]
    assert list(map(load_tokenizer(dataset.path).decode, [[n] for n in range(8)])) == ["<unk>", *words]
    assert dataset.vocab_size == 9
    assert ids_of(dataset)[0][5] == 0


def test_words_decode_one_by_one_with_blanks_between(prepare, tmp_path):
    stream = parse_tokenizer(vocabulary.closed_json(["the", "cat"], words=True).encode(), "words").stream()
    assert [stream.push(number) for number in (1, 2, 0, 3)] == ["the", " cat", " <unk>", ""]


def test_a_vocabulary_of_words_has_the_size_that_was_asked_for(prepare, tmp_path):
    (tmp_path / "in.txt").write_text(LINES)
    dataset, _ = prepare(tmp_path / "in.txt", tokenizer="word", vocab_size=4, split="1")
    assert dataset.vocab_size == 4
    assert [load_tokenizer(dataset.path).decode([n]) for n in range(3)] == ["<unk>", "the", "cat"]


def test_a_word_level_file_is_taken_with_its_unknown_and_end_tokens(prepare, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    built = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "the": 2, "cat": 3, "sat": 4}, "<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.save(str(tmp_path / "words.json"))
    lines = [" the cat sat \n", " the <unk> cat sat \n"] * 3
    (tmp_path / "in.txt").write_text("".join(lines))
    dataset, _ = prepare(
        tmp_path / "in.txt", tokenizer=str(tmp_path / "words.json"), separator="\\n", split="1"
    )
    assert ids_of(dataset)[:2] == [[2, 3, 4, 0], [2, 1, 3, 4, 0]]  # the usual stream of the Penn Treebank
    assert dataset.manifest["tokenizer"]["kind"] == "WordLevel"
    (tmp_path / "other.txt").write_text("a dog ran home " * 20)
    with pytest.raises(DataError, match="does not fit this text: 100% of it is lost"):
        prepare(tmp_path / "other.txt", tokenizer=str(tmp_path / "words.json"), output=tmp_path / "other")


def test_the_penn_treebank_is_its_words_with_an_end_after_each_line(prepare, shared, tmp_path):
    path = shared / "text" / "ptb.valid.txt"
    dataset, _ = prepare(path, tokenizer="word", separator="\\n", split="1")
    lines = path.read_text().splitlines()
    tokens = np.concatenate(ids_of(dataset))
    assert len(tokens) == sum(len(line.split()) + 1 for line in lines) == 73_760
    assert (tokens == dataset.eod_id).sum() == len(lines)
    tokenizer = load_tokenizer(dataset.path)
    known = [line for line in ids_of(dataset) if 0 not in line]
    assert all(tokenizer.decode(line) in {" ".join(text.split()) for text in lines} for line in known[:50])


def test_a_folder_of_the_penn_treebank_has_its_splits(prepare, tmp_path):
    folder = tmp_path / "ptb"
    folder.mkdir()
    for name, words in (("train", "the cat <unk>"), ("valid", "the dog"), ("test", "a cat")):
        (folder / f"ptb.{name}.txt").write_text(f" {words} \n" * 3)
    (folder / "ptb.char.train.txt").write_text("t h e")
    dataset, _ = prepare(folder, tokenizer="word", separator="\\n")
    found = [dataset.split(name).num_documents for name in ("train", "validation", "test")]
    assert found == [3, 3, 3]
    assert dataset.vocab_size == 4  # the words of the training text, <unk> and the end
    (folder / "ptb.test.txt").unlink()
    dataset, _ = prepare(folder, tokenizer="word", separator="\\n", split="1", output=tmp_path / "two")
    assert dataset.split("test") is None


# --- the size of a BPE ---


@pytest.mark.parametrize(
    ("text_bytes", "ids"),
    [
        (0, 512),
        (1_115_394, 512),
        (3_000 * 1024 - 1, 512),
        (3_000 * 1024, 1024),
        (12_118_641, 2048),
        (100_000_000, 32_768),
        (10**13, 32_768),
    ],
)
def test_a_larger_text_gets_a_larger_vocabulary(text_bytes, ids):
    assert default_vocab(text_bytes) == ids


def test_the_default_vocabulary_follows_from_the_text_alone(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "BYTES_PER_ID", 1)
    monkeypatch.setattr(vocabulary, "MIN_DEFAULT", 300)
    line = json.dumps({"other": "x" * 900, "text": "some words that come again " * 20}) + "\n"
    (tmp_path / "in.jsonl").write_text(line)
    made = [
        prepare(
            tmp_path / "in.jsonl", tokenizer="bpe", split="9,1", range_bytes=size, output=tmp_path / str(size)
        )
        for size in (100, 100_000)
    ]
    assert made[0][0].manifest == made[1][0].manifest
    tokenise = made[0][0].manifest["lineage"][1]
    assert tokenise["settings"] == {"tokenizer": "bpe", "vocab_size_chosen_for_bytes": 540}
    assert "training a byte-level BPE with 512 ids, chosen for 0.0 MB of text" in made[0][1]


def test_a_text_beyond_the_sample_counts_with_the_size_of_its_files(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "SAMPLE_BYTES", 1000)
    monkeypatch.setattr(vocabulary, "SAMPLE_RANGE", 500)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"word {n} " * 40}) + "\n" for n in range(20)))

    def measured(**options):
        dataset, _ = prepare(path, tokenizer="bpe", split="1", output=tmp_path / str(len(options)), **options)
        return dataset.manifest["lineage"][1]["settings"]["vocab_size_chosen_for_bytes"]

    assert measured() == path.stat().st_size
    assert measured(limit=2) == 2 * 280


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokenizer": "char", "vocab_size": 300}, "--vocab-size 300 with --tokenizer char: .* is fixed"),
        ({"tokenizer": "word", "vocab_size": 2}, "--vocab-size 2 is not between 3 and"),
        ({"tokenizer": "bpe", "vocab_size": 256}, "--vocab-size 256 is not between 257 and"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path, options, text):
    with pytest.raises(ConfigError, match=text):
        PrepareOptions(("in.txt",), tmp_path, **options)
