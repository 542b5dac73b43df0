"""Documents that are equal, and groups of documents that share a band: sorted bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.prepare.dedup.ranges import Buckets, Numbered, bucket_count, load, save
from shoal.runtime.files import atomic_write

EXACT = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<i8")])
EQUAL = np.dtype([("number", "<i8"), ("first", "<i8")])  # a document, and the first one of the same text
BAND = np.dtype([("key", "<u8"), ("number", "<i8")])


def find_equal(work: Path, numbered: Numbered, max_memory_bytes: int) -> NDArray[Any]:
    """Return the documents (EQUAL, by number) that have the text of an earlier one. Committed once."""
    path = work / "equal.npy"
    if not path.exists():
        count = bucket_count(numbered.total, EXACT.itemsize, max_memory_bytes)
        buckets = Buckets(work / "rows", "exact", EXACT, count)
        for index, start in enumerate(numbered.starts[:-1]):
            column = numbered.narrow(index).column("exact").combine_chunks()
            present = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
            hashes = np.frombuffer(column.buffers()[1] or b"", "<u8").reshape(-1, 2)
            rows = np.empty(len(present), EXACT)
            rows["high"], rows["low"] = hashes[present].T
            rows["number"] = present + start
            buckets.add(rows, rows["high"])
        found = [_equal_in(buckets.take(number)) for number in range(count)]
        equal = np.concatenate(found)
        save(path, equal[np.argsort(equal["number"])])
    return load(path)


def _equal_in(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the EQUAL rows of one bucket."""
    rows = rows[np.lexsort((rows["number"], rows["low"], rows["high"]))]
    same = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
    new = np.concatenate([[True], ~same])[: len(rows)]
    first = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    equal = np.empty(int(np.count_nonzero(~new)), EQUAL)
    equal["number"], equal["first"] = rows["number"][~new], rows["number"][first[~new]]
    return equal


def find_groups(
    work: Path, numbered: Numbered, equal: NDArray[Any], bands: int, max_memory_bytes: int
) -> list[Path]:
    """Return one file for each band: BAND rows of all documents that share the band with another one, by key
    and number. Documents in `equal` are left out. Each file is committed once.
    """
    count = bucket_count(numbered.total, BAND.itemsize, max_memory_bytes)
    paths = [work / "groups" / f"{band:03d}.rows" for band in range(bands)]
    for band, path in enumerate(paths):
        if path.exists():
            continue
        buckets = Buckets(work / "rows", "band", BAND, count)
        for index in range(len(numbered.files)):
            rows = _band_rows(numbered, index, equal, band)
            buckets.add(rows, rows["key"])
        with atomic_write(path) as file:
            for number in range(count):
                file.write(_shared(buckets.take(number)).tobytes())
    return paths


def read_groups(path: Path, max_rows: int) -> Iterator[NDArray[Any]]:
    """Yield the groups of a file, about so many rows at a time; no group is cut."""
    low, total = 0, path.stat().st_size // BAND.itemsize
    rows = np.memmap(path, BAND, "r") if total else np.zeros(0, BAND)
    while low < total:
        high = min(low + max_rows, total)
        high = int(np.searchsorted(rows["key"], rows["key"][high - 1], side="right"))
        yield rows[low:high]
        low = high


def _band_rows(numbered: Numbered, index: int, equal: NDArray[Any], band: int) -> NDArray[Any]:
    """Return the BAND rows of a range: documents with shingles that are the first of their text."""
    table, start, stop = numbered.narrow(index), *numbered.starts[index : index + 2]
    kept = table.column("shingles").to_numpy() > 0
    first, last = np.searchsorted(equal["number"], [start, stop])
    kept[equal["number"][first:last] - start] = False
    keys = [chunk.flatten().to_numpy().reshape(len(chunk), -1)[:, band] for chunk in table["bands"].chunks]
    rows = np.empty(int(np.count_nonzero(kept)), BAND)
    rows["number"] = np.flatnonzero(kept) + start
    rows["key"] = np.concatenate([np.zeros(0, np.uint64), *keys])[kept]
    return rows


def _shared(rows: NDArray[Any]) -> NDArray[np.void]:
    """Return the rows whose key occurs more than once, by key and number."""
    rows = rows[np.argsort(rows["key"], kind="stable")]
    same = rows["key"][1:] == rows["key"][:-1]
    shared = np.zeros(len(rows), np.bool_)
    shared[1:] |= same
    shared[:-1] |= same
    return rows[shared]
