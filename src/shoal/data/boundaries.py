"""Where a long text may be cut so that the ids of its pieces, end to end, are the ids of the whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_HAN = rb"(?:\xe4[\xb8-\xbf]|[\xe5-\xe9][\x80-\xbf])[\x80-\xbf]"  # U+4E00..U+9FFF, letters all


@dataclass(frozen=True)
class Boundary:
    """A place that `pattern` finds in UTF-8 bytes; the next piece starts `skip` bytes behind it."""

    pattern: re.Pattern[bytes]
    skip: int = 0

    def find(self, data: bytes, start: int) -> int | None:
        """Return the first place from `start` on, None where there is none."""
        found = self.pattern.search(data, start)
        return found.start() if found else None


AFTER_WORD = Boundary(
    re.compile(rb"(?<=[A-Za-z0-9])(?=[ \n])|(?<=" + _HAN + rb")(?=[ \n]|\xef\xbc\x8c|\xe3\x80\x82)")
)
BEFORE_SPACE = Boundary(re.compile(rb"(?=[ \n])"))  # for words that white space divides
ANYWHERE = Boundary(re.compile(rb"(?=[\x00-\x7f\xc0-\xff])"))  # before any character
# SentencePiece puts a blank of its own before each text: it stands for the one that is left out.
BETWEEN_WORDS = Boundary(re.compile(rb"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])"), skip=1)

_BPE = 2
_PLAIN_NORMALISERS = {b"identity", b"nfkc", b"nmt_nfkc", b"nfkc_cf", b"nmt_nfkc_cf"}
_SPANS_WORDS = re.compile("[^\u2581]\u2581| ")  # U+2581 stands for a blank


def sentencepiece_boundary(model: bytes, pieces: Iterable[str]) -> Boundary | None:
    """Return where texts may be cut under a SentencePiece `.model`; None where no place is known.

    A BPE whose pieces never hold a blank after a letter merges nothing across words. A unigram model weighs
    whole texts, with rounding that depends on all that came before: no cut is safe.
    Field numbers: sentencepiece_model.proto, ModelProto, TrainerSpec and NormalizerSpec.
    """
    try:
        parts = {number: value for number, value in _fields(model) if isinstance(value, bytes)}
        trainer, normaliser = (dict(_fields(parts.get(number, b""))) for number in (2, 3))
    except (ValueError, IndexError):
        return None
    plain = (
        trainer.get(3) == _BPE
        and not trainer.get(24, 0)  # treat_whitespace_as_suffix
        and normaliser.get(3, 1)  # add_dummy_prefix
        and normaliser.get(5, 1)  # escape_whitespaces
        and normaliser.get(1) in _PLAIN_NORMALISERS
    )
    return BETWEEN_WORDS if plain and not any(map(_SPANS_WORDS.search, pieces)) else None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of a protocol buffer's fields."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {kind}")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a variable-length integer and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
