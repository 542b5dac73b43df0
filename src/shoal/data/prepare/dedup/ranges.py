"""Ranges of documents with their narrow rows, the numbers of their documents, and buckets of rows on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shoal.data.prepare.dedup.settings import DedupSettings, check_signatures
from shoal.errors import DataError
from shoal.runtime.files import atomic_write, disk_error

MAX_BUCKETS = 512
Say = Callable[[str], None]


class RunJobs(Protocol):
    """Runs a job class, made once in each worker from `spec`, on all items; yields results in any order."""

    def __call__(
        self, job: str, spec: dict[str, Any], items: list[dict[str, Any]]
    ) -> Iterable[dict[str, Any]]: ...


@dataclass(frozen=True)
class RangeFiles:
    """One range: an Arrow file with the texts, and one with their narrow rows, in one order."""

    documents: Path
    signatures: Path


class Numbered:
    """Ranges in document order. Documents of older datasets come first, under negative numbers."""

    def __init__(self, old: Sequence[RangeFiles], new: Sequence[RangeFiles], settings: DedupSettings) -> None:
        self.files, self._settings = [*old, *new], settings
        self.rows = [self._count(files) for files in self.files]
        self.num_old = len(old)
        self.starts = np.cumsum([-sum(self.rows[: len(old)]), *self.rows]).astype(np.int64)

    @cached_property
    def total(self) -> int:
        """Return the number of documents, those of older datasets included."""
        return sum(self.rows)

    def _count(self, files: RangeFiles) -> int:
        try:
            with pa.memory_map(str(files.signatures)) as source, pa.ipc.open_file(source) as reader:
                check_signatures(reader.schema, self._settings, str(files.signatures))
                return int(sum(reader.get_batch(n).num_rows for n in range(reader.num_record_batches)))
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{files.signatures} cannot be read: {error}") from error

    def narrow(self, index: int) -> pa.Table:
        """Return a range's narrow rows, mapped into memory."""
        return pa.ipc.open_file(pa.memory_map(str(self.files[index].signatures))).read_all()


def file_batches(path: Path, *columns: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow file, with the named columns alone if any: others are not unpacked."""
    with pa.memory_map(str(path)) as source:
        places = [pa.ipc.open_file(source).schema.get_field_index(name) for name in columns]
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=places or None))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def bucket_count(rows: int, row_bytes: int, max_memory_bytes: int) -> int:
    """Return how many buckets it takes until one of them is sorted in a quarter of the memory."""
    needed = -(-rows * row_bytes * 4 // max(max_memory_bytes // 4, 1 << 20))  # 4: sorting makes copies
    return int(min(max(needed, 1), MAX_BUCKETS))


class Buckets:
    """Rows on disk, spread by a 64-bit hash; within a bucket they keep the order in which they came."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, count: int) -> None:
        self._paths = [folder / f"{name}-{number:04d}.rows" for number in range(count)]
        self._dtype = dtype
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._paths:  # those of a run that was killed
            path.unlink(missing_ok=True)

    def add(self, rows: NDArray[Any], key: NDArray[np.uint64]) -> None:
        """Append rows, each to the bucket of its key."""
        place = ((key >> np.uint64(32)) * np.uint64(len(self._paths))) >> np.uint64(32)
        self.append(rows, place.astype(np.int64))

    def append(self, rows: NDArray[Any], place: NDArray[np.int64]) -> None:
        """Append each row to the bucket whose number is its place."""
        order = np.argsort(place, kind="stable")
        rows, place = rows[order], place[order]
        for number in np.unique(place):
            first, last = np.searchsorted(place, [number, number + 1])
            try:
                with self._paths[number].open("ab") as file:
                    file.write(rows[first:last].tobytes())
            except OSError as error:
                raise disk_error(error, self._paths[number]) from error

    def take(self, number: int) -> NDArray[Any]:
        """Return the rows of a bucket, and remove its file."""
        path = self._paths[number]
        rows = np.fromfile(path, self._dtype) if path.exists() else np.zeros(0, self._dtype)
        path.unlink(missing_ok=True)
        return rows

    def __len__(self) -> int:
        return len(self._paths)


def save(path: Path, rows: NDArray[Any]) -> None:
    """Commit an array under its name, atomically."""
    with atomic_write(path) as file:
        np.save(file, rows)


def load(path: Path) -> NDArray[Any]:
    """Map an array that `save` wrote into memory."""
    empty = os.path.getsize(path) < 256 and np.load(path).size == 0  # an empty file cannot be mapped
    rows: NDArray[Any] = np.load(path, mmap_mode=None if empty else "r")
    return rows
