"""Cut out of the training text what evaluation files hold, found by overlapping n-grams of words.

The method is that of GPT-3 (Brown and others, 2020, appendix C); the thresholds are those of Megatron-LM's
`tools/openwebtext/filter_ngrams.py`.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.data.prepare.stages.documents import Stage, StageSettings, dropped, with_columns, with_meta
from shoal.data.prepare.stages.hashing import mixed, powers
from shoal.data.prepare.stages.scripts import IDEOGRAPHS, SYLLABIC
from shoal.data.texts import read_lines, read_text, undo_moses
from shoal.errors import ConfigError, DataError, InputError

_MAX_FILES = 64 << 20  # bytes of all evaluation files; an n-gram, 6 bytes of text, takes 30 in a process
_MAX_NGRAM = 64
_SHOWN = 80  # characters of a match in a detail
_WINDOW = 1 << 18  # characters hashed at a time
_CODES = 0x323B0  # code points above are in no word; neither is the last below
_SPACED, _HAN, _THAI = 1, 2, 3  # kinds of characters in words
_CHARS_PER_WORD = {_SPACED: 1.0, _HAN: 1.5, _THAI: 4.0}  # of the scripts whose characters count one by one
_SENTENCE_END = re.compile(r"[.!?\n。！？]")


class Decontaminate(StageSettings):
    """Remove passages of evaluation files from the training text."""

    name: ClassVar[str] = "decontaminate"

    files: tuple[str, ...] = Field(min_length=1)
    """Evaluation files. In .jsonl files (LAMBADA's form) the `text` of each line is a passage; in other text
    files, among them WikiText's, each paragraph."""
    ngram: int = Field(default=13, ge=1, le=_MAX_NGRAM)
    """Number of consecutive words that count as an overlap. A word is a run of letters and digits, in lower
    case. In passages of Han and Kana, 1.5 characters count as a word (20 characters for 13 words); in Thai,
    Lao, Tibetan, Khmer and Burmese, 4 characters (52)."""
    min_ngram: int = Field(default=8, ge=1, le=_MAX_NGRAM)
    """Shorter passages of at least this many words must occur as a whole; still shorter ones are ignored."""
    margin: NonNegativeInt = 200
    """Characters that are removed on each side of an overlap, and on to the end of the sentence."""
    min_piece: NonNegativeInt = 200
    """Remaining pieces of a document with fewer characters are removed."""
    max_pieces: PositiveInt = 10
    """Documents that fall into more pieces are dropped."""
    max_count: PositiveInt = 10
    """N-grams that occur more often in the training text are ignored as common phrases."""

    def resolved(self, say: Callable[[str], None]) -> Decontaminate:
        """Read the evaluation files: an error comes before the work."""
        _Index(self)
        return self

    def counting(self) -> Callable[[pa.RecordBatch], Counter[str]]:
        """Return the function that counts how often n-grams of the evaluation files occur in a batch."""
        index = _Index(self)

        def count(batch: pa.RecordBatch) -> Counter[str]:
            found = Counter[str]()
            for text in batch.column("text").to_pylist():
                found.update(map(index.name, index.find(text or "").places.tolist()))
            return found

        return count

    def common(self, counts: Mapping[str, int]) -> list[str]:
        """Return the n-grams to ignore, by the counts of the whole training text."""
        return sorted(name for name, count in counts.items() if count > self.max_count)

    def start(self, common: Sequence[str] = ()) -> Stage:
        """Return the stage; it ignores the n-grams in `common`."""
        index = _Index(self, common)

        def decontaminate(batch: pa.RecordBatch) -> pa.RecordBatch:
            texts = batch.column("text").to_pylist()
            cuts = {row: cut for row, text in enumerate(texts) if text and (cut := index.cut(text))}
            if not cuts:
                return batch
            for row, cut in cuts.items():
                texts[row] = cut.text
            rows = [cuts.get(row) for row in range(len(texts))]
            facts = [{"decontaminated": cut.removed} if cut and not cut.refused else None for cut in rows]
            reasons = [("contaminated", cut.refused) if cut and cut.refused else None for cut in rows]
            return dropped(with_meta(with_columns(batch, {"text": texts}), facts), self.name, reasons)

        return decontaminate


@dataclass(frozen=True)
class _Cut:
    """What is left of a document, and why it is dropped where that is not enough."""

    text: str
    removed: int  # pieces
    refused: str


@dataclass(frozen=True)
class _Matches:
    """Overlaps in a text: characters [starts, ends), n-gram numbers."""

    starts: np.ndarray
    ends: np.ndarray
    places: np.ndarray


class _Index:
    """The n-grams of the evaluation files, less the common ones."""

    def __init__(self, settings: Decontaminate, common: Sequence[str] = ()) -> None:
        if settings.min_ngram > settings.ngram:
            raise ConfigError(
                f"decontaminate.min_ngram = {settings.min_ngram} is larger than ngram = {settings.ngram}",
                hint=f"use at most {settings.ngram}",
            )
        self._settings, self._words = settings, _Words()
        self._passages: list[tuple[int, int]] = []  # (file, line or paragraph from 1)
        lengths, hashes, origins = set[int](), [np.zeros(0, np.uint64)], [np.zeros(0, np.int32)]
        for file, number, text in _passages(settings.files):
            for _, _, words, kinds in self._words.windows(text):
                length, grams = self._ngrams(words, kinds)
                if len(grams):
                    lengths.add(length)
                    hashes.append(grams)
                    origins.append(np.full(len(grams), len(self._passages), np.int32))
            self._passages.append((file, number))
        self._hashes, first = np.unique(np.concatenate(hashes), return_index=True)
        if not len(self._hashes):
            raise DataError(
                f"no passage in {', '.join(settings.files)} has {settings.min_ngram} words",
                hint="name other files, or lower decontaminate.min_ngram",
            )
        ignored = np.array([int(name, 16) for name in common], np.uint64)
        kept = ~np.isin(self._hashes, ignored)
        self._hashes, self._origins = self._hashes[kept], np.concatenate(origins)[first[kept]]
        self._lengths = sorted(lengths)
        bits = max(
            16, (8 * len(self._hashes)).bit_length()
        )  # most n-grams are told apart by a table in cache
        self._mask = np.uint64((1 << bits) - 1)
        self._filter = np.zeros(1 << bits, bool)
        self._filter[self._hashes & self._mask] = True

    def name(self, place: int) -> str:
        """Return the name of an n-gram, which is the same in every process."""
        return f"{int(self._hashes[place]):016x}"

    def _ngrams(self, words: np.ndarray, kinds: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the length of a passage's n-grams in words or characters, and their hashes."""
        counts = np.bincount(kinds, minlength=4)
        script = max(_CHARS_PER_WORD, key=lambda kind: counts[kind] / _CHARS_PER_WORD[kind])
        most, least = (
            round(length * _CHARS_PER_WORD[script])
            for length in (self._settings.ngram, self._settings.min_ngram)
        )
        length = min(len(words), most)
        return length, self._words.ngrams(words, length) if length >= least else words[:0]

    def find(self, text: str) -> _Matches:
        """Find all overlaps, each once."""
        found, seen = [(np.zeros(0, np.int64),) * 3], -1
        for starts, ends, words, _ in self._words.windows(text):
            for length in self._lengths:
                grams = self._words.ngrams(words, length)
                maybe = np.flatnonzero(self._filter[grams & self._mask])
                maybe = maybe[ends[maybe + length - 1] > seen]  # windows overlap
                if len(maybe) and len(self._hashes):
                    places = np.minimum(np.searchsorted(self._hashes, grams[maybe]), len(self._hashes) - 1)
                    same = self._hashes[places] == grams[maybe]
                    maybe, places = maybe[same], places[same]
                    found.append((starts[maybe], ends[maybe + length - 1], places))
            seen = ends[-1] if len(ends) else seen
        starts, ends, places = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.lexsort((ends, starts))
        return _Matches(starts[order], ends[order], places[order])

    def cut(self, text: str) -> _Cut | None:
        """Remove the overlaps from a text; None if it has none."""
        matches, wanted = self.find(text), self._settings
        if not len(matches.starts):
            return None
        pieces, at, removed, match = [], 0, 0, 0
        while match < len(matches.starts):
            before = int(matches.starts[match]) - wanted.margin + 1
            pieces.append(text[at : max(text.rfind(mark, at, max(before, at)) + 1 for mark in ".!?\n。！？")])
            after = _SENTENCE_END.search(text, int(matches.ends[match]) + wanted.margin)
            at, removed = after.end() if after else len(text), removed + 1
            match = int(np.searchsorted(matches.starts, at))
        pieces = [piece for piece in (*pieces, text[at:]) if len(piece.strip()) >= max(wanted.min_piece, 1)]
        refused = ""
        if not pieces:
            refused = f"no piece of {wanted.min_piece} characters is left without it"
        elif len(pieces) > wanted.max_pieces:
            refused = f"it falls into {len(pieces)} pieces, more than {wanted.max_pieces}"
        if refused:
            shown = " ".join(text[matches.starts[0] : matches.ends[0]][:_SHOWN].split())
            refused = f"{self._origin(int(matches.places[0]))}: {shown!r}; {refused}"
        return _Cut("\n\n".join(piece.strip() for piece in pieces), removed, refused)

    def _origin(self, place: int) -> str:
        """Name the file and passage of an n-gram."""
        file, number = self._passages[self._origins[place]]
        path = Path(self._settings.files[file])
        return f"{path.name}, {'line' if _is_jsonl(path) else 'paragraph'} {number}"


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".ndjson", ".json")


def _passages(files: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield (file, line or paragraph from 1, text) of all passages."""
    left = _MAX_FILES
    for file, path in enumerate(map(Path, files)):
        left -= path.stat().st_size if path.is_file() else 0
        if left < 0:
            raise InputError(
                f"the evaluation files have more than {_MAX_FILES >> 20} MiB at {path}", hint="name fewer"
            )
        if _is_jsonl(path):
            yield from ((file, number, text) for number, text in read_lines(path))
        else:
            paragraphs = re.split(r"\n\s*\n", undo_moses(read_text(path)).strip())
            yield from ((file, number, text) for number, text in enumerate(paragraphs, start=1))


class _Words:
    """Cuts text into words and hashes them, and their n-grams, to 64 bits."""

    def __init__(self) -> None:
        self._kinds = np.zeros(_CODES, np.uint8)
        self._lower = np.zeros(_CODES, np.uint64)
        for code, char in enumerate(map(chr, range(_CODES - 1))):
            is_mark = unicodedata.category(char)[0] == "M"  # an accent or vowel sign
            if char.isalnum() or char == "_" or is_mark:
                self._kinds[code] = _SPACED
                self._lower[code] = ord(char.lower()[0])
        for kind, ranges in ((_HAN, IDEOGRAPHS), (_THAI, SYLLABIC)):
            for first, last in ranges:
                part = self._kinds[first : last + 1]
                part[part > 0] = kind
        self._powers, self._inverses = powers(_WINDOW)

    def windows(self, text: str) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (starts, ends, hashes, kinds) of the words, window by window; each n-gram lies within one."""
        at, overlap = 0, 4 * _MAX_NGRAM
        while at < len(text):
            raw = text[at : at + _WINDOW].encode("utf-32-le", "surrogatepass")
            codes = np.minimum(np.frombuffer(raw, np.uint32), _CODES - 1)
            kinds = self._kinds[codes]
            breaks = np.ones(len(kinds) + 1, bool)
            breaks[1:-1] = (kinds[1:] != kinds[:-1]) | (kinds[1:] > _SPACED)
            starts = np.flatnonzero((kinds > 0) & breaks[:-1])
            ends = np.flatnonzero((kinds > 0) & breaks[1:]) + 1
            is_last = at + _WINDOW >= len(text)
            if not is_last and len(ends) and ends[-1] == _WINDOW:  # the next window has this word whole
                starts, ends = starts[:-1], ends[:-1]
            yield starts + at, ends + at, self._hashes(self._lower[codes], starts, ends), kinds[starts]
            if is_last:
                return
            at += int(starts[-overlap]) if len(starts) > overlap else _WINDOW  # so few words are no text

    def ngrams(self, words: np.ndarray, length: int) -> np.ndarray:
        """Return the hashes of all n-grams of `length` consecutive words."""
        if len(words) < length:
            return words[:0]
        return self._hashes(words, slice(0, len(words) - length + 1), slice(length, len(words) + 1))

    def _hashes(self, values: np.ndarray, starts: np.ndarray | slice, ends: np.ndarray | slice) -> np.ndarray:
        """Hash values[starts:ends]: polynomials modulo 2^64 by differences of prefix sums, then mixed."""
        sums = np.zeros(len(values) + 1, np.uint64)
        np.cumsum(values * self._powers[: len(values)], out=sums[1:])
        return mixed((sums[ends] - sums[starts]) * self._inverses[starts])
