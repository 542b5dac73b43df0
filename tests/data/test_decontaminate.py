"""Decontamination by planted overlaps: each threshold, common n-grams, other scripts, limits."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from shoal.data.prepare.stages import decontaminate
from shoal.data.prepare.stages.decontaminate import Decontaminate
from shoal.errors import ConfigError, DataError, InputError
from tests.data.documents import batch_of

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdfgklmnprst"]
HAN = [chr(code) for code in range(0x4E00, 0x5200)]
THAI = [chr(code) for code in range(0x0E01, 0x0E2F)]


def words(number, seed):
    return random.Random(f"words {seed}").sample(WORDS, number)


def prose(characters, seed):
    """Return sentences of six words and of exactly so many characters."""
    chosen = random.Random(seed)
    text = ""
    while len(text) < characters:
        text += " ".join(chosen.sample(WORDS, 6)) + ". "
    return text[: characters - 1] + "."


@pytest.fixture
def stage(tmp_path):
    """Return stage(passages, ...) -> settings that decontaminate against a file of these passages."""

    def call(*passages, **settings):
        path = tmp_path / "questions.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages), encoding="utf-8")
        return Decontaminate(files=(str(path),), **settings)

    return call


def apply(settings, *texts, common=()):
    return settings.start(common)(batch_of(texts)).to_pylist()


def test_no_overlap_leaves_the_batch_untouched(stage):
    batch = batch_of([prose(2000, 1), None, "", prose(500, 2)])
    assert stage(" ".join(words(40, 3))).start()(batch) is batch


@pytest.mark.parametrize(("overlap", "found"), [(13, True), (12, False)])
def test_thirteen_words_are_an_overlap(stage, overlap, found):
    passage = words(40, 1)
    text = prose(1000, 2) + " ".join(passage[7 : 7 + overlap]) + ". " + prose(1000, 3)
    (row,) = apply(stage(" ".join(passage)), text)
    assert (row["text"] != text) is found
    assert (row["meta"] == '{"decontaminated": 1}') is found


@pytest.mark.parametrize(("length", "found"), [(7, False), (8, True), (12, True)])
def test_passages_from_eight_words_on_must_occur_as_a_whole(stage, length, found):
    passage = words(length, 1)
    whole, part = (prose(900, 2) + " ".join(some) + ". " + prose(900, 3) for some in (passage, passage[1:]))
    long = " ".join(words(20, 9))  # so that the file is not without n-grams
    rows = apply(stage(" ".join(passage), long), whole, part)
    assert [row["text"] != text for row, text in zip(rows, (whole, part), strict=True)] == [found, False]


def test_case_and_punctuation_do_not_hide_an_overlap(stage):
    passage = words(13, 1)
    shouted = ' -- "'.join(passage).upper()
    assert apply(stage(", ".join(passage)), prose(900, 2) + shouted + ". " + prose(900, 3))[0]["meta"]


def test_two_hundred_characters_on_each_side_go_and_on_to_the_end_of_the_sentence(stage):
    passage = " ".join(words(13, 1))
    before, after = "a" * 300 + ". B" + "b" * 197, "c" * 198 + "C. " + "d" * 300
    (row,) = apply(stage(passage), f"{before} {passage} {after}")  # the overlap and 199 characters beside it
    assert row["text"] == "a" * 300 + ".\n\n" + "d" * 300
    (row,) = apply(stage(passage), f"{before[:-1]} {passage} {after}")
    assert row["text"] == "a" * 300 + ".\n\n" + "d" * 300
    (row,) = apply(stage(passage), f"{before[:-2]} {passage} {after}")  # the stop is 199 characters away
    assert row["text"] == "d" * 300
    (row,) = apply(stage(passage), f"{before} {passage} {after[1:]}")  # here on the other side
    assert row["text"] == "a" * 300 + "."
    (row,) = apply(stage(passage, margin=0), f"{before} {passage} {after}")
    assert row["text"] == "a" * 300 + ".\n\n" + "d" * 300


@pytest.mark.parametrize(("left", "kept"), [(199, False), (200, True)])
def test_pieces_under_two_hundred_characters_go(stage, left, kept):
    passage = " ".join(words(13, 1))
    text = "a" * 499 + ". " + "b" * 200 + f" {passage} " + "c" * 200 + ". " + "d" * left
    (row,) = apply(stage(passage), text)
    assert row["text"] == "a" * 499 + "." + ("\n\n" + "d" * left) * kept
    assert row["stage"] is None


@pytest.mark.parametrize(("overlaps", "dropped"), [(9, False), (10, True)])
def test_documents_of_more_than_ten_pieces_are_dropped(stage, overlaps, dropped):
    passage = " ".join(words(13, 1))
    text = prose(600, 0) + "".join(f" {passage}. {prose(900, n + 1)}" for n in range(overlaps))
    (row,) = apply(stage(passage), text)
    assert (row["text"] is None) is dropped
    if dropped:
        assert (row["stage"], row["reason"]) == ("decontaminate", "contaminated")
        shown = passage[:80].strip()
        assert row["detail"] == (f"questions.jsonl, line 1: {shown!r}; it falls into 11 pieces, more than 10")
    else:
        assert row["text"].count("\n\n") == 9


def test_a_document_without_a_piece_left_is_dropped_with_file_and_passage(stage):
    first, second = (" ".join(words(13, seed)) for seed in (1, 2))
    (row,) = apply(stage(first, second), f"Here: {second}")
    assert (row["text"], row["reason"]) == (None, "contaminated")
    assert row["detail"].startswith("questions.jsonl, line 2: ")
    assert row["detail"].endswith("; no piece of 200 characters is left without it")


@pytest.mark.parametrize(("times", "ignored"), [(10, False), (11, True)])
def test_n_grams_that_occur_more_than_ten_times_are_ignored(stage, times, ignored):
    passage = " ".join(words(13, 1))
    rare = " ".join(words(13, 2))
    settings = stage(passage, rare)
    text = prose(700, 2) + passage + ". " + prose(700, 3)
    count, total = settings.counting(), Counter()
    for _ in range(times):
        total.update(json.loads(json.dumps(count(batch_of([text, None])))))  # as from a worker
    assert list(total.values()) == [times]
    common = settings.common(total)
    first, second = apply(settings, text, text + rare, common=common)
    assert (first["text"] == text) is ignored
    assert second["meta"]


def test_the_count_of_a_long_text_has_each_overlap_once(stage, monkeypatch):
    monkeypatch.setattr(decontaminate, "_WINDOW", 4000)
    passage = words(30, 1)
    parts = [prose(random.Random(n).randrange(200, 3000), n) + " ".join(passage) + ". " for n in range(30)]
    text = "".join(parts)
    assert set(stage(" ".join(passage)).counting()(batch_of([text])).values()) == {30}


def brute_force(passage, text):
    """Return where 13-grams of the passage begin in the text, by regular expressions."""
    grams = {tuple(passage[n : n + 13]) for n in range(len(passage) - 12)}
    found = list(re.finditer(r"\w+", text.lower()))
    return [
        found[n].start()
        for n in range(len(found) - 12)
        if tuple(match.group() for match in found[n : n + 13]) in grams
    ]


def test_the_overlaps_are_those_of_brute_force(stage, monkeypatch):
    monkeypatch.setattr(decontaminate, "_WINDOW", 5000)
    chosen, passage = random.Random(0), words(60, 1)
    parts = []
    for _ in range(400):
        start = chosen.randrange(50)
        parts += [*passage[start : start + chosen.randrange(20)], *chosen.sample(WORDS, chosen.randrange(5))]
    text = "".join(word + chosen.choice((" ", ", ", ".\n", " – ")) for word in parts)
    index = decontaminate._Index(stage(" ".join(passage)))
    expected = brute_force(passage, text)
    assert len(expected) > 100
    assert index.find(text).starts.tolist() == expected


@pytest.mark.parametrize(("letters", "length"), [(HAN, 20), (THAI, 52)])
def test_without_spaces_between_words_characters_count(stage, letters, length):
    passage = "".join(random.Random(1).choices(letters, k=length + 30))
    settings = stage(passage)

    def planted(number):
        lines = ["".join(random.Random(seed).choices(letters, k=60)) for seed in range(2, 22)]
        return "\n".join([*lines[:10], passage[5 : 5 + number], *lines[10:]])

    rows = apply(settings, planted(length), planted(length - 1))
    assert [row["meta"] is not None for row in rows] == [True, False]


def test_a_chinese_sentence_ends_at_its_own_full_stop(stage):
    passage = "".join(random.Random(1).choices(HAN, k=25))
    (row,) = apply(stage(passage), "天" * 300 + "。" + "地" * 210 + passage + "人" * 210 + "。" + "山" * 250)
    assert row["text"] == "天" * 300 + "。\n\n" + "山" * 250


def test_mixed_text_is_found_by_words_and_characters(stage):
    passage = "在 PyTorch 里面，我们用 DataLoader 读取训练数据并且打乱顺序，然后训练模型"
    (row,) = apply(stage(passage), prose(900, 1) + passage + "。" + prose(900, 2))
    assert row["meta"]


def test_text_files_are_cut_into_paragraphs_and_wikitext_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "wiki.tokens"
    path.write_text(
        " \n = A title = \n \n The cats did n't like that dog , whose 1 @,@ 000 fleas jumped around ! \n"
    )
    text = prose(900, 1) + "The cats didn't like that dog, whose 1,000 fleas jumped around! " + prose(900, 2)
    settings = Decontaminate(files=(str(path),), min_piece=2000)
    (row,) = apply(settings, text)
    assert row["detail"].startswith("wiki.tokens, paragraph 2: ")


def test_lambada_is_found_in_text_that_holds_it(shared):
    path = shared / "eval" / "lambada_test.jsonl"
    lines = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()[:50]]
    batch = batch_of([prose(800, n) + "\n" + text + "\n" + prose(800, -n) for n, text in enumerate(lines)])
    settings = Decontaminate(files=(str(path),))
    rows = settings.start()(batch).to_pylist()
    assert all(row["meta"] for row in rows)
    again = settings.start()(batch_of([row["text"] for row in rows]))
    assert [row["text"] for row in again.to_pylist()] == [row["text"] for row in rows]


def test_hostile_text_is_no_error(stage):
    passage = " ".join(words(13, 1))
    texts = [
        "\x00" * 5000,
        "\U0010ffff" * 300_000,
        "x" * 600_000,
        " " * 600_000 + passage,
        "\ufeff" + passage,
    ]
    rows = apply(stage(passage, "\ud800 broken"), *texts)
    assert [row["text"] is None for row in rows] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("content", "settings", "error", "message"),
    [
        ('{"text": "too short"}', {}, DataError, "no passage in .* has 8 words"),
        ('{"text": 3}', {}, DataError, "line 1: no passage of words"),
        ("[" * 9000, {}, DataError, "line 1"),
        ('{"text": "a b"}', {"min_ngram": 14}, ConfigError, "min_ngram = 14 is larger than ngram = 13"),
        (None, {}, InputError, "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path, content, settings, error, message):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=message):
        Decontaminate(files=(str(path),), **settings).start()


def test_the_size_of_evaluation_files_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(decontaminate, "_MAX_FILES", 100)
    (tmp_path / "a.txt").write_text("a b c d e f g h i")
    (tmp_path / "b.txt").write_text("a b c d e f g h i" * 9)
    with pytest.raises(InputError, match=r"more than 0 MiB at .*b\.txt"):
        Decontaminate(files=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))).start()
