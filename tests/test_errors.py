"""How messages count."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from shoal.errors import counted

SOURCES = sorted(Path(__file__).parents[1].glob("src/shoal/**/*.py"))


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (0, "layer", "0 layers"),
        (3, "micro-batch", "3 micro-batches"),
        (1200, "file", "1,200 files"),
    ],
)
def test_a_noun_agrees_with_its_number(number, noun, words):
    assert counted(number, noun) == words


def test_no_text_leaves_open_whether_it_is_one_or_more():
    texts = [
        node.value
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(texts) > 1000
    assert [text for text in texts if re.search(r"\w\((s|es)\)", text)] == []
