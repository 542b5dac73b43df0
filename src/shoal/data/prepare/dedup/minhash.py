"""Signatures of documents: an exact hash, and MinHash bands over 5-grams of words or characters.

Everything works on whole batches in numpy, in pieces that stay in the cache. Hashes have 64 bits and do not
depend on the machine, the batch, or numpy's random generators.
Source: Broder, "On the resemblance and containment of documents", 1997.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from shoal.data.prepare.dedup.paragraphs import paragraph_hashes
from shoal.data.prepare.dedup.settings import DedupSettings, signature_schema
from shoal.data.prepare.stages.hashing import mixed, powers
from shoal.data.prepare.stages.scripts import IDEOGRAPHS, SYLLABIC, UNSPACED_SHARE

NGRAM = 5
_HIGH_SURROGATES_OF_HAN = (0xD840, 0xD8BF)  # code points from 0x20000 to 0x3FFFF
_PIECE = 1 << 15  # bytes of text whose prefix hashes are in work at a time
_BLOCK = 1024  # shingles whose hashes are in work at a time: 1024 x 112 x 4 bytes stay in the cache
# Lowers ASCII letters and makes 0 of what is in no word; bytes above 127 stay.
_WORD_BYTES = bytes(b if b > 127 or b == 95 or chr(b).isalnum() else 0 for b in range(256)).lower()

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]


class Signer:
    """Makes the narrow rows of batches of texts; one in each process."""

    def __init__(self, settings: DedupSettings) -> None:
        self._settings, self.schema = settings, signature_schema(settings)
        self._shingler = Shingler(settings.shingle)
        self._hashes = MinHashes(settings.num_hashes, settings.seed)

    def sign(self, texts: pa.LargeStringArray) -> pa.RecordBatch:
        """Return one narrow row for each text: exact hash, number of shingles (0 for a null), band hashes.

        Rows without shingles have bands of 0, which are no candidates.
        """
        filled = pc.fill_null(texts, "")
        exact = [xxhash.xxh3_128_digest(view) if view else None for view in _views(filled)]
        columns, counts = {"exact": pa.array(exact, pa.binary(16))}, np.zeros(len(texts), np.int32)
        if self._settings.near:
            shingles, bounds = self._shingler.shingles(filled)
            counts = np.diff(bounds).astype(np.int32)
            bands = band_hashes(self._hashes.minima(shingles, bounds), self._settings.rows)
            bands[counts == 0] = 0
            columns["bands"] = pa.FixedSizeListArray.from_arrays(bands.ravel(), self._settings.bands)
        if self._settings.paragraphs:
            columns["paragraphs"] = paragraph_hashes(texts, self._settings.min_chars)
        columns["shingles"] = pa.array(counts)
        return pa.RecordBatch.from_arrays([columns[name] for name in self.schema.names], schema=self.schema)


class Shingler:
    """Turns texts into hashed 5-grams of words, or of characters where words are not separated by spaces."""

    def __init__(self, kind: str = "auto") -> None:
        self._kind = kind
        self._powers, self._inverses = powers(_PIECE)
        self._letters = np.array([chr(code).isalpha() for code in range(1 << 16)], np.uint8)  # of UTF-16
        for first, last in (*IDEOGRAPHS, *SYLLABIC, _HIGH_SURROGATES_OF_HAN):
            self._letters[first : last + 1] = 2

    def shingles(self, texts: pa.LargeStringArray) -> tuple[U64, I64]:
        """Return the hashed shingles of all texts, and where those of each begin: text i has those of
        `bounds[i]` to `bounds[i + 1]`, in their order and with repetitions. Texts must not be null.

        A text of fewer than 5 words (characters) has one shingle, one without any has none.
        """
        by_characters = np.flatnonzero(self._by_characters(texts))
        if not len(by_characters):
            return _combine(*self._words(texts))
        if len(by_characters) == len(texts):
            return _combine(*_characters(texts.to_pylist()))
        by_words = np.setdiff1d(np.arange(len(texts)), by_characters)
        words = _combine(*self._words(texts.take(pa.array(by_words))))
        characters = _combine(*_characters(texts.take(pa.array(by_characters)).to_pylist()))
        return _interleave(words, characters, np.concatenate([by_words, by_characters]))

    def _by_characters(self, texts: pa.LargeStringArray) -> NDArray[np.bool_]:
        """Tell for each text whether its shingles are made of characters."""
        if self._kind != "auto":
            return np.full(len(texts), self._kind == "characters")
        ascii_only = pc.string_is_ascii(texts).to_numpy(zero_copy_only=False)
        chosen = np.zeros(len(texts), np.bool_)
        for row in np.flatnonzero(~ascii_only):
            codes = np.frombuffer(texts[int(row)].as_py().encode("utf-16-le"), "<u2")
            kinds = self._letters[codes]
            unspaced = np.count_nonzero(kinds == 2)
            chosen[row] = unspaced and unspaced >= UNSPACED_SHARE * np.count_nonzero(kinds)
        return chosen

    def _words(self, texts: pa.LargeStringArray) -> tuple[U64, I64]:
        """Return the hashes of all words, and where those of each text begin.

        A word's hash is a polynomial in its bytes: a difference of prefix sums, divided by a power of the
        base. Prefix sums are taken piece by piece, and only their values at the words' edges are kept.
        """
        if not pc.all(pc.string_is_ascii(texts)).as_py():
            texts = pc.utf8_lower(texts)
        joined = b"\n".join([*_views(texts), b""])
        data = np.frombuffer(joined.translate(_WORD_BYTES), np.uint8)
        edges, values = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        carry, scale, inside = np.zeros(1, np.uint64), np.ones(1, np.uint64), False
        for low in range(0, len(data), _PIECE):
            piece = data[low : low + _PIECE]
            word = piece != 0
            at = np.flatnonzero(word[1:] != word[:-1]) + 1
            at = np.concatenate([[0], at]) if word[0] != inside else at
            inside = bool(word[-1])
            sums = np.zeros(len(piece) + 1, np.uint64)
            np.cumsum(piece * self._powers[: len(piece)], out=sums[1:])
            edges.append(at + low)
            values.append(sums[at] * scale + carry)
            carry, scale = carry + sums[-1:] * scale, scale * self._powers[-1]
        at, sums = np.concatenate(edges), np.concatenate(values)
        starts = at[::2]
        pieces = np.cumprod(np.full(len(data) // _PIECE + 1, self._inverses[-1])) * self._powers[-1]
        words = (sums[1::2] - sums[::2]) * self._inverses[starts % _PIECE] * pieces[starts // _PIECE]
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(pc.binary_length(texts).to_numpy() + 1, out=offsets[1:])
        return words, np.searchsorted(starts, offsets).astype(np.int64)


class MinHashes:
    """Hash functions a x + b modulo 2^32, a odd, on the low halves of the shingles' hashes."""

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        drawn = hashlib.shake_128(f"shoal minhash {seed}".encode()).digest(8 * number)
        a, b = np.frombuffer(drawn, "<u4").reshape(2, number, 1)
        self._a, self._b = a | np.uint32(1), b.copy()
        self._work = np.empty((number, _BLOCK), np.uint32)

    def minima(self, shingles: U64, bounds: I64) -> U32:
        """Return the minimum of each function over each text's shingles: texts x functions."""
        result = np.full((len(bounds) - 1, len(self._a)), np.iinfo(np.uint32).max, np.uint32)
        filled = np.flatnonzero(np.diff(bounds))  # `reduceat` knows no empty parts
        starts = bounds[filled]
        for low in range(0, len(shingles), _BLOCK):
            x = shingles[low : low + _BLOCK].astype(np.uint32)
            hashed = np.multiply(self._a, x, out=self._work[:, : len(x)])
            hashed += self._b
            first = np.searchsorted(starts, low, side="right") - 1
            last = np.searchsorted(starts, low + len(x))
            parts = np.minimum.reduceat(hashed, np.maximum(starts[first:last] - low, 0), axis=1)
            rows = filled[first:last]
            result[rows] = np.minimum(result[rows], parts.T)
        return result


def band_hashes(minima: U32, rows: int) -> U64:
    """Return one hash for each band of `rows` minimums: texts x bands."""
    cut = minima.reshape(len(minima), -1, rows).astype(np.uint64)
    return _mixed([cut[:, :, row] for row in range(rows)])


def _views(texts: pa.LargeStringArray) -> list[memoryview]:
    """Return the bytes of each text, none of them null, without a copy."""
    _, offsets, data = texts.buffers()
    at = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1].tolist()
    whole = memoryview(data or b"")
    return [whole[at[row] : at[row + 1]] for row in range(len(texts))]


def _characters(texts: Sequence[str]) -> tuple[U64, I64]:
    """Return the characters of all texts but white space, lower-cased, and where those of each begin."""
    packed = ["".join(text.split()).lower().encode("utf-32-le") for text in texts]
    bounds = np.cumsum([0, *map(len, packed)]) // 4
    return np.frombuffer(b"".join(packed), "<u4").astype(np.uint64), bounds.astype(np.int64)


def _combine(units: U64, bounds: I64) -> tuple[U64, I64]:
    """Combine each 5 neighbours of a text to one shingle; return shingles and where those of each begin."""
    counts, padded = np.diff(bounds), np.concatenate([units, np.zeros(NGRAM - 1, np.uint64)])
    shingles = _mixed([padded[place : place + len(units)] for place in range(NGRAM)])
    keep = np.ones(len(units), np.bool_)
    for back in range(1, NGRAM):  # of the last places no 5-gram begins, but at the first of all
        keep[bounds[1:][counts > back] - back] = False
    firsts, sizes = bounds[:-1][short := (counts > 0) & (counts < NGRAM)], counts[short]
    parts = [padded[firsts + place] * (place < sizes) for place in range(NGRAM)]
    shingles[firsts] = _mixed([part.astype(np.uint64) for part in parts])
    sizes = np.maximum(counts - (NGRAM - 1), np.minimum(counts, 1))
    return shingles[keep], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _mixed(parts: Sequence[U64]) -> U64:
    """Combine arrays to one hash for each place."""
    value = parts[0].copy()
    for part in parts[1:]:
        value *= np.uint64(0xD6E8FEB86659FD93)
        value += part
    return mixed(value)


def _interleave(one: tuple[U64, I64], other: tuple[U64, I64], order: I64) -> tuple[U64, I64]:
    """Join two parts whose texts are the places `order` of the whole, and put them into their places."""
    values = np.concatenate([one[0], other[0]])
    starts = np.concatenate([one[1][:-1], other[1][:-1] + len(one[0])])
    counts, back = np.concatenate([np.diff(one[1]), np.diff(other[1])]), np.argsort(order)
    starts, counts = starts[back], counts[back]
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return values[np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], counts)], bounds
