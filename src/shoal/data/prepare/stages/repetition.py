"""How much of a text is n-grams that occur again and again, over words or over characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

MAX_UNITS = 200_000  # of a text; more are not looked at
TOP_SIZES = range(2, 5)


def word_units(words: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, lengths in characters) of the words, both [words] int64; equal words have equal ids."""
    words, table = words[:MAX_UNITS], dict[str, int]()
    ids = np.fromiter(map(table.setdefault, words, count()), np.int64, len(words))
    return ids, np.fromiter(map(len, words), np.int64, len(words))


def character_units(text: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, lengths) of the characters of a text that are not white space.

    An id is that of the character with the `width` - 1 that follow it, so that an n-gram of every `width`-th
    id has n times `width` characters.
    """
    data = "".join(text[:MAX_UNITS].split()).encode("utf-32-le")
    characters = np.frombuffer(data, np.uint32).astype(np.int64)
    ids = characters
    for shift in range(1, width):
        pairs = ids[: len(characters) - shift] * (1 << 21) + characters[shift:]
        ids = np.unique(pairs, return_inverse=True)[1]
    return ids, np.ones(len(characters), np.int64)


def too_repetitive(
    ids: np.ndarray, lengths: np.ndarray, bounds: Sequence[float], width: int = 1
) -> tuple[int, float] | None:
    """Return (n, share of the characters) of the first n from 2 on whose share is above its bound.

    n up to 4: in the most frequent n-gram, of equally frequent ones the longest. From 5 on: in n-grams that
    occurred before. Each character counts once. Rae and others, Scaling Language Models, 2021, table A1.
    `width` is the number of units from an id to the next one of its n-gram.
    """

    def covered(starts: np.ndarray, size: int) -> float:
        edges = np.bincount(starts, minlength=len(lengths) + 1)
        edges -= np.bincount(starts + size, minlength=len(lengths) + 1)
        return float(lengths[np.cumsum(edges[:-1]) > 0].sum() / before[-1])

    before = np.concatenate([[0], np.cumsum(lengths)])  # characters before a unit
    again = np.bincount(ids, minlength=1)[ids] > 1
    starts, grams = np.flatnonzero(again), ids[again]
    for n, bound in enumerate(bounds, start=2):
        last = starts + (n - 1) * width
        inside = last < len(ids)
        inside[inside] = again[last[inside]]
        if not inside.any():
            return None
        keys = grams[inside] * (1 << 32) + ids[last[inside]]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        new = np.concatenate([[True], keys[1:] != keys[:-1]])  # the first one of equal n-grams
        grams = np.cumsum(new) - 1
        counts = np.bincount(grams)
        repeated = counts[grams] > 1  # only these can begin a longer one that is repeated
        starts, grams, new = starts[inside][order][repeated], grams[repeated], new[repeated]
        if not len(starts) or covered(starts, n * width) <= min(bounds[n - 2 :]):
            return None
        if n in TOP_SIZES:
            sizes = (before[starts + n * width] - before[starts]) * (counts[grams] == counts.max())
            share = covered(starts[grams == grams[sizes.argmax()]], n * width)
        else:
            share = covered(starts[~new], n * width)
        if share > bound:
            return n, share
    return None
