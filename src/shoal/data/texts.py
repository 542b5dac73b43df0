"""The texts and questions that models are measured on, as they are published."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import DataError, InputError

MAX_BYTES = 4 << 30
# WikiText was cut into words by the Moses rules of its makers (Merity and others, 2016); these undo them.
_MOSES = (
    (r" (n't|'(?:s|re|ve|ll|d|m))\b", r"\1"),
    (r"s ' ", "s' "),
    (r" @([-,.])@ ", r"\1"),
    (r" ([:;.,!?])(?=\s)", r"\1"),
    (r"([(\[{]) (.*?) (?=[)\]}])", r"\1\2"),
    (r'" (.*?) "', r'"\1"'),
    (r"' (.*?) '", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (r" ?\n ?", "\n"),
    (r" \u00b0 ", "\u00b0 "),
)


def read_text(path: Path) -> str:
    """Read a UTF-8 text file; an InputError or DataError says what is wrong with it."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES >> 30} GiB", hint="give a part of it")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not text:
        raise DataError(f"{path} is empty")
    return text


def undo_moses(text: str) -> str:
    """Return WikiText as it was written, but for what cannot be known again."""
    for pattern, written in _MOSES:
        text = re.sub(pattern, written, text)
    return text


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line from 1, stripped `text`) of the JSON lines of a file; blank lines are skipped."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)["text"].strip()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _no_passage(path, number, error) from error


def read_passages(path: Path) -> list[tuple[str, str]]:
    """Read LAMBADA's JSON lines as (context, last word with the space before it)."""
    passages = []
    for number, text in read_lines(path):
        try:
            context, word = text.rsplit(" ", 1)
        except ValueError as error:
            raise _no_passage(path, number, error) from error
        passages.append((context, f" {word}"))
    if not passages:
        raise DataError(f"{path} holds no passage")
    return passages


def _no_passage(path: Path, number: int, error: Exception) -> DataError:
    hint = 'write {"text": "two words"}'
    return DataError(f"{path}, line {number}: no passage of words: {error}", hint=hint)
