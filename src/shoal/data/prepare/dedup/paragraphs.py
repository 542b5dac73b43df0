"""Paragraphs that occur again are cut out: narrow rows of hashes, and what of each document goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from shoal.data.prepare.dedup.ranges import Buckets, Numbered, bucket_count
from shoal.runtime.files import atomic_write

BLANK, SHORT = 0, 1  # in the place of hashes: a paragraph without text; one that is never cut out
PLACE = np.dtype([("hash", "<u8"), ("number", "<i8"), ("index", "<i4")])
CUTS = pa.schema([("number", pa.int64()), ("cut", pa.large_list(pa.int32()))])


def paragraph_hashes(texts: pa.LargeStringArray, min_chars: int) -> pa.LargeListArray:
    """Return a hash for each paragraph (line) of each text, white space normalised; [] for a null."""
    hashes, bounds = [], np.zeros(len(texts) + 1, np.int64)
    for row, text in enumerate(texts.to_pylist()):
        lines = [] if text is None else [" ".join(line.split()) for line in text.split("\n")]
        for line in lines:
            long = len(line) >= min_chars
            hashes.append(
                max(xxhash.xxh3_64_intdigest(line.encode()), 2) if long else SHORT if line else BLANK
            )
        bounds[row + 1] = len(hashes)
    return pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(hashes, pa.uint64()))


def without_paragraphs(text: str, cut: Sequence[int]) -> str:
    """Return the text without the paragraphs (lines) whose indexes are in `cut`."""
    gone = set(cut)
    return "\n".join(line for index, line in enumerate(text.split("\n")) if index not in gone)


def find_paragraphs(
    work: Path, numbered: Numbered, dropped: NDArray[np.int64], max_memory_bytes: int, path: Path
) -> NDArray[np.int64]:
    """Write which paragraphs of kept documents occurred before (CUTS, by number), one batch for each range.

    Return the numbers of the documents that have nothing else. `dropped` documents (sorted) neither lose
    paragraphs nor count as earlier ones; nor do those of older datasets.
    """
    new = range(numbered.num_old, len(numbered.files))
    total = sum(int(_places(numbered, index, dropped)[1].sum()) for index in new)
    count = bucket_count(total, PLACE.itemsize, max_memory_bytes)
    by_hash = Buckets(work / "rows", "paragraphs", PLACE, count)
    for index in new:
        rows, _ = _places(numbered, index, dropped)
        by_hash.add(rows, rows["hash"])
    by_range = Buckets(work / "rows", "cuts", PLACE, max(len(new), 1))
    for number in range(count):
        rows = by_hash.take(number)
        rows = rows[np.argsort(rows["hash"], kind="stable")]
        rows = rows[1:][rows["hash"][1:] == rows["hash"][:-1]]
        place = np.searchsorted(numbered.starts, rows["number"], side="right") - 1 - numbered.num_old
        by_range.append(rows, place)
    emptied = [np.zeros(0, np.int64)]
    with atomic_write(path) as file, pa.ipc.new_file(file, CUTS) as out:
        for place, index in enumerate(new):
            rows = by_range.take(place)
            rows = rows[np.lexsort((rows["index"], rows["number"]))]
            numbers, sizes = np.unique(rows["number"], return_counts=True)
            bounds = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
            cuts = pa.LargeListArray.from_arrays(bounds, pa.array(rows["index"]))
            out.write_batch(pa.RecordBatch.from_arrays([pa.array(numbers), cuts], schema=CUTS))
            _, filled = _places(numbered, index, dropped)
            emptied.append(numbers[filled[numbers - numbered.starts[index]] == sizes])
    return np.concatenate(emptied)


def _places(
    numbered: Numbered, index: int, dropped: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the long paragraphs (PLACE, in order) of a range's kept documents, and how many each document
    has that are not blank."""
    lists, start = numbered.narrow(index).column("paragraphs").combine_chunks(), numbered.starts[index]
    offsets, hashes = lists.offsets.to_numpy(), lists.values.to_numpy()
    owner = np.repeat(np.arange(len(lists)), np.diff(offsets))
    gone = np.zeros(len(lists), np.bool_)
    gone[dropped[slice(*np.searchsorted(dropped, [start, start + len(lists)]))] - start] = True
    kept = ~gone[owner]
    at = np.flatnonzero((hashes > SHORT) & kept)
    rows = np.empty(len(at), PLACE)
    rows["hash"], rows["number"], rows["index"] = hashes[at], owner[at] + start, at - offsets[owner[at]]
    return rows, np.bincount(owner[kept & (hashes != BLANK)], minlength=len(lists))
