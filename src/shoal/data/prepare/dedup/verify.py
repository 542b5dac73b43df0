"""Shingle sets of the documents that share a band, and the exact Jaccard similarity of pairs of them.

Both are jobs for worker processes. Sets are made once for each document, its range read in order; pairs then
read them from mapped files.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shoal.data.prepare.dedup.minhash import MinHashes, Shingler
from shoal.data.prepare.dedup.ranges import file_batches, load, save
from shoal.data.prepare.dedup.settings import DedupSettings
from shoal.data.prepare.engine import Check
from shoal.runtime.files import atomic_write

PAIR = np.dtype([("a", "<i8"), ("b", "<i8"), ("estimated", "<f8"), ("exact", "<f8")])
SETS_JOB = "shoal.data.prepare.dedup.verify:ShingleSets"
PAIRS_JOB = "shoal.data.prepare.dedup.verify:Pairs"
_OPEN_RANGES, _HELD = 64, 1024  # files of two that are mapped; sets in memory


class ShingleSets:
    """Makes the shingle sets of a range's wanted documents: a file of values and one of their index."""

    def __init__(self, spec: dict[str, Any]) -> None:
        settings = DedupSettings(**spec["settings"])
        self._work = Path(spec["work"])
        self._shingler = Shingler(settings.shingle)
        self._hashes = MinHashes(settings.num_hashes, settings.seed)

    def run(self, item: dict[str, Any], check: Check) -> dict[str, Any]:
        """Commit the sets of range `item["index"]`, whose documents are numbered from `item["start"]`."""
        values_path, index_path = _set_paths(self._work, item["index"])
        wanted = load(self._work / "wanted.npy")[item["first"] :]
        entries, size, row = [], 0, 0
        with atomic_write(values_path) as file:
            for batch in file_batches(Path(item["documents"]), "text"):
                check(0)
                texts = batch.column("text")
                rows = np.flatnonzero(wanted[row : row + len(texts)])
                row += len(texts)
                if not len(rows):
                    continue
                chosen = pc.fill_null(texts.take(pa.array(rows)), "")
                shingles, bounds = self._shingler.shingles(chosen)
                index = np.empty(len(rows), _index_dtype(self._hashes))
                index["number"] = rows + (item["start"] + row - len(texts))
                index["minima"] = self._hashes.minima(shingles, bounds)
                for place in range(len(rows)):
                    found = np.unique(shingles[bounds[place] : bounds[place + 1]])
                    file.write(found.tobytes())
                    index["first"][place], index["size"][place] = size, len(found)
                    size += len(found)
                entries.append(index)
        save(index_path, np.concatenate([np.zeros(0, _index_dtype(self._hashes)), *entries]))
        return {"index": item["index"], "documents": sum(map(len, entries))}


class Pairs:
    """Computes the similarities of pairs, from the sets that ShingleSets made."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._work = Path(spec["work"])
        self._threshold = float(spec["settings"]["threshold"])
        self._starts = np.array(spec["starts"], np.int64)
        self._range = functools.lru_cache(_OPEN_RANGES)(self._open_range)
        self._entry = functools.lru_cache(_HELD)(self._find_entry)

    def run(self, item: dict[str, Any], check: Check) -> dict[str, Any]:
        """Compare `number` pairs of the file `pairs` from `first` on; commit those that are similar."""
        pairs = load(Path(item["pairs"]))[item["first"] :][: item["number"]]
        save(Path(item["found"]), self.similar(pairs, check))
        return {"found": item["found"]}

    def similar(self, pairs: NDArray[Any], check: Check) -> NDArray[Any]:
        """Return the pairs that reach the threshold, with both similarities."""
        found = np.zeros(len(pairs), PAIR)
        found["a"], found["b"] = pairs["a"], pairs["b"]
        for number, (a, b) in enumerate(pairs[["a", "b"]].tolist()):
            if number % 256 == 0:
                check(0)
            (one, minima), (other, others) = self._entry(a), self._entry(b)
            if min(len(one), len(other)) / max(len(one), len(other)) < self._threshold:
                continue  # no overlap can reach the threshold
            found[number]["exact"] = jaccard(one, other)
            found[number]["estimated"] = np.mean(minima == others)
        return found[found["exact"] >= self._threshold]

    def _find_entry(self, number: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Return the set and the minimums of a document."""
        index, values = self._range(int(np.searchsorted(self._starts, number, side="right")) - 1)
        entry = index[np.searchsorted(index["number"], number)]
        assert entry["number"] == number, number
        first, size = int(entry["first"]), int(entry["size"])
        return np.array(values[first : first + size]), np.array(entry["minima"])  # maps can be closed

    def _open_range(self, index: int) -> tuple[NDArray[Any], NDArray[np.uint64]]:
        values_path, index_path = _set_paths(self._work, index)
        return load(index_path), np.memmap(values_path, np.uint64, "r")


def jaccard(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> float:
    """Return the Jaccard similarity of two sets, each sorted and without repetitions."""
    both = np.concatenate([one, other])
    both.sort(kind="stable")  # merges the two runs
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    return common / (len(both) - common)


def _index_dtype(hashes: MinHashes) -> np.dtype:
    fields: list[Any] = [("number", "<i8"), ("first", "<i8"), ("size", "<i8")]
    return np.dtype([*fields, ("minima", "<u4", (hashes.number,))])


def _set_paths(work: Path, index: int) -> tuple[Path, Path]:
    """Return the file of a range's sets, and that of their index, whose presence says that both are there."""
    return work / "sets" / f"{index:07d}.u64", work / "sets" / f"{index:07d}.npy"


def has_sets(work: Path, index: int) -> bool:
    """Tell whether a range's sets are committed."""
    return _set_paths(work, index)[1].exists()
