"""Long texts cut into pieces: under a BPE that joins runs of blanks, the ids are those of the whole text."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers, trainers

from shoal.data import tokenizer as tokenizer_module
from shoal.data.bytelevel import BYTE_OF, CUTTABLE_PATTERNS
from shoal.data.tokenizer import closed_json, parse_tokenizer
from tests.data.byte_level import byte_level

BLANKS = [" ", "  ", "    ", "\n", "\n\n", "\n \n", "\t", "\t\t", "\r\n", "\x0b", "\x0c", "\x85"]
BLANKS += ["\u00a0", "\u1680", "\u2003", "\u2028", "\u3000", "\u200b", "\ufeff"]
WORDS = [
    "a",
    "the",
    "The",
    "12",
    "1234",
    "x1",
    "'s",
    "'",
    "'ll",
    "!",
    "...",
    "_",
    "é",
    "e\u0301",
    "ß",
    "½",
    "٣",
]
WORDS += ["中", "中文", "，", "。", "，。", "の", "한", "🙂", "👩‍👩‍👧", "(a)", "\x00"]
TEXTS = st.lists(st.sampled_from(BLANKS + WORDS) | st.text(max_size=3), max_size=40).map("".join)


def trained(pattern):
    """Train a BPE whose merges join blanks, words and bytes of characters, as far as the pattern lets it."""
    built = byte_level(models.BPE(), pattern)
    parts = BLANKS + WORDS
    text = [one + two + three for one in parts for two in parts for three in ("", " ", "a")]
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=sorted(BYTE_OF), show_progress=False)
    built.train_from_iterator([*text, *text], trainer)
    built.add_special_tokens(["<|endoftext|>"])
    return parse_tokenizer(built.to_str().encode(), "own"), built


@pytest.fixture(scope="module", params=sorted(CUTTABLE_PATTERNS))
def own(request):
    return trained(request.param)


def test_its_merges_join_runs_of_blanks(own):
    ours, _ = own
    for text in ("  ", "    ", "\n\n", "\t\t", " the", "中文"):
        assert len(ours.encode(text)) == 1, text
    with mock.patch.object(tokenizer_module, "PIECE_BYTES", 8):
        assert len(list(ours._pieces("the  end\n\n" * 50))) == 51


@cache
def closed(kind):
    """Make a tokenizer of characters or words that knows half of what TEXTS is made of."""
    words = sorted({word for word in WORDS[::2] if word != "'"})
    content = closed_json("a ,中\n\u00a0🙂\x00" if kind == "char" else words, words=kind != "char")
    built = Reference.from_str(content)
    if kind == "whitespace":
        built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.encode_special_tokens = True
    return parse_tokenizer(built.to_str().encode(), "own"), built


@pytest.mark.parametrize("kind", ["char", "word", "whitespace"])
@given(text=TEXTS, piece_bytes=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
@example(text="a <|endoftext|> <unk>\n中", piece_bytes=1)
def test_characters_and_words_are_those_of_the_library_however_the_text_is_cut(kind, text, piece_bytes):
    ours, reference = closed(kind)
    with mock.patch.object(tokenizer_module, "PIECE_BYTES", piece_bytes):
        if kind == "char" and piece_bytes == 1:
            assert len(list(ours._pieces(text))) >= len(text)
        assert ours.encode(text) == reference.encode(text).ids


@given(text=TEXTS, piece_bytes=st.integers(1, 12))
@settings(max_examples=300, deadline=None)
@example(text="a  b", piece_bytes=1)
@example(text="a \n\n b   \n c", piece_bytes=1)
@example(text="中 \u3000中，， 中。\n", piece_bytes=1)
def test_ids_of_the_pieces_are_those_of_the_text(own, text, piece_bytes):
    ours, reference = own
    with mock.patch.object(tokenizer_module, "PIECE_BYTES", piece_bytes):
        pieces = list(ours._pieces(text))
        assert "".join(pieces) == text
        assert ours.encode(text) == reference.encode(text).ids
        assert [one for piece in pieces for one in reference.encode(piece).ids] == reference.encode(text).ids
