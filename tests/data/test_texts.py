"""Evaluation texts as they are published: WikiText's words, LAMBADA's lines."""

import pytest

from shoal.data.texts import read_lines, read_passages, undo_moses
from shoal.errors import DataError


def test_moses_is_undone():
    cut = " = = Title = = \n The \" big \" dog ( 3 @-@ 4 @.@ 5 ) , 1 @,@ 000 cats ' toys ; it 's fine . \n"
    assert undo_moses(cut) == " == Title ==\nThe \"big\" dog (3-4.5), 1,000 cats' toys; it's fine.\n"


def test_a_line_without_a_passage_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "two words"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"bad.jsonl, line 2"):
        read_passages(tmp_path / "bad.jsonl")


def test_lines_without_two_words_are_texts_but_no_passages(tmp_path):
    (tmp_path / "one.jsonl").write_text('\n{"text": " \u5929\u5730 "}\n', encoding="utf-8")
    assert list(read_lines(tmp_path / "one.jsonl")) == [(2, "\u5929\u5730")]
    with pytest.raises(DataError, match=r"one.jsonl, line 2: no passage of words"):
        read_passages(tmp_path / "one.jsonl")
