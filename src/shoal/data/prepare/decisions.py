"""What became of each document: `stages/documents.parquet` of a dataset that was prepared by stages."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shoal.errors import DataError, InputError, counted
from shoal.runtime.files import atomic_write, read_error, read_json

TABLE = "documents.parquet"  # in the folder `stages`
DUPLICATE = ("exact", "near", "against", "paragraphs")  # stages that drop what was there before
ROWS = 1 << 14  # of a row group, but for the last
_MAX_GROUP = 256 << 20  # bytes of a row group, uncompressed: what the limits below allow
_MOST = {"url": 2048, "stage": 64, "reason": 128, "detail": 512, "language": 64}  # characters
_SAME_HOST = 1000  # URLs that are looked at for one that was meant
DECISIONS = pa.schema(
    [
        ("number", pa.int64()),  # of the document in the order of the input, from 0
        ("file", pa.int32()),  # in the list of files in `parse.json`
        ("offset", pa.int64()),
        ("url", pa.string()),
        ("stage", pa.string()),  # the stage that dropped it; null: kept
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("survivor", pa.int64()),  # number of the document of its cluster that was kept
        ("twin", pa.int64()),  # number of the document that it was compared with
        ("estimated", pa.float32()),  # similarity to the twin by MinHash, 0 to 1
        ("exact", pa.float32()),  # the same by Jaccard
        ("cluster", pa.int32()),  # number of documents that are near-duplicates of each other
        ("language", pa.string()),
        ("chars", pa.int32()),  # of the text when it was dropped or kept
        ("split", pa.int8()),  # 0 train, 1 validation, 2 test
        ("position", pa.int64()),  # number of the document in the split's token file
    ]
)


class DecisionsWriter:
    """Writes the table batch by batch. The bytes do not depend on where batches end."""

    def __init__(self, path: Path) -> None:
        self._path, self._stack = path, ExitStack()
        self._pending = DECISIONS.empty_table()
        self._number = 0

    def __enter__(self) -> DecisionsWriter:
        file = self._stack.enter_context(atomic_write(self._path))
        self._out = self._stack.enter_context(pq.ParquetWriter(file, DECISIONS, compression="zstd"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and len(self._pending):
            self._out.write_table(self._pending.combine_chunks())
        self._stack.__exit__(kind, error, trace)

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the rows of the next documents; long texts are cut."""
        numbers = rows.column("number").to_numpy()
        assert np.array_equal(numbers, np.arange(self._number, self._number + len(rows))), numbers
        self._number += len(rows)
        columns = {name: rows.column(name) for name in DECISIONS.names}
        columns |= {name: pc.utf8_slice_codeunits(columns[name], 0, most) for name, most in _MOST.items()}
        more = pa.Table.from_pydict(columns, schema=DECISIONS)
        self._pending = pa.concat_tables([self._pending, more])
        while len(self._pending) >= ROWS:
            self._out.write_table(self._pending.slice(0, ROWS).combine_chunks())
            self._pending = self._pending.slice(ROWS)


class Decisions:
    """The table of a finished dataset, row group by row group; its sizes are checked before they are read."""

    def __init__(self, dataset: Path) -> None:
        self._path = dataset / "stages" / TABLE
        with self._read():
            self._file = pq.ParquetFile(self._path)
            facts = self._file.metadata
            groups = [facts.row_group(n) for n in range(facts.num_row_groups)]
            rows, full = [group.num_rows for group in groups], [ROWS] * (len(groups) - 1)
            if (
                not self._file.schema_arrow.equals(DECISIONS)
                or rows[:-1] != full
                or max(rows, default=0) > ROWS
            ):
                raise ValueError("other columns or row groups than Shoal writes")
            if any(group.total_byte_size > _MAX_GROUP for group in groups):
                raise ValueError(f"a row group of more than {_MAX_GROUP >> 20} MiB")
            self.num_documents = sum(rows)
        with self._read():
            record = read_json(dataset / "stages" / "parse.json", "record of a stage")
            self.files = [str(file["path"]) for file in record["files"]]

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the table in parts of at most ROWS rows."""
        for group in range(self._file.num_row_groups):
            with self._read():
                table = self._file.read_row_group(group, columns=columns)
            yield table

    def row(self, number: int) -> dict[str, Any]:
        """Return what became of a document: its row, and the `path` of its file."""
        if not 0 <= number < self.num_documents:
            raise InputError(
                f"document {number}: {self._path} has {counted(self.num_documents, 'document')}",
                hint=f"give a number from 0 to {self.num_documents - 1}",
            )
        with self._read():
            group = self._file.read_row_group(number // ROWS)
            facts: dict[str, Any] = group.slice(number % ROWS, 1).to_pylist()[0]
            if facts["number"] != number:
                raise ValueError(f"document {facts['number']} where {number} belongs")
            if facts["split"] not in (None, 0, 1, 2):
                raise ValueError(f"split {facts['split']}")
            return {**facts, "path": self.files[facts["file"]]}

    def find(self, doc: str) -> dict[str, Any]:
        """Find a document by its number, FILE:OFFSET, FILE (if it is the only one in it), or URL."""
        if doc.isascii() and doc.isdigit() and len(doc) < 19:
            return self.row(int(doc))
        if "://" in doc:
            return self._by_url(doc[: _MOST["url"]])
        file, _, offset = doc.rpartition(":")
        if file and offset.isascii() and offset.isdigit() and len(offset) < 19 and not self._files(doc):
            return self._by_offset(file, int(offset))
        number = self._one_file(doc)
        found = list(self._where(file=number))
        if len(found) != 1:
            first = f"{doc}:{self.row(found[0])['offset']}" if found else "another file"
            raise InputError(
                f"{doc} has {counted(len(found), 'document')}", hint=f"give FILE:OFFSET: {first}"
            )
        return self.row(found[0])

    def _by_offset(self, file: str, offset: int) -> dict[str, Any]:
        number = self._one_file(file)
        for found in self._where(file=number, offset=offset):
            return self.row(found)
        near = [
            min(offsets, key=lambda one: abs(one - offset))
            for table in self.tables(["file", "offset"])
            if (offsets := table.filter(pc.equal(table["file"], number))["offset"].to_pylist())
        ]
        hint = f"the nearest is at {min(near, key=lambda one: abs(one - offset))}" if near else "it has none"
        raise InputError(f"no document of {file} begins at offset {offset}", hint=hint)

    def _by_url(self, url: str) -> dict[str, Any]:
        for found in self._where(url=url):
            return self.row(found)
        host = "/".join(url.split("/")[:3])
        others: list[str] = []
        for table in self.tables(["url"]):
            others += table["url"].filter(pc.fill_null(pc.starts_with(table["url"], host), False)).to_pylist()
            del others[_SAME_HOST:]
        raise InputError(f"no document has the URL {url}", hint=_meant(url, others))

    def _where(self, **wanted: int | str) -> Iterator[int]:
        """Yield the numbers of the documents with these values."""
        for group, table in enumerate(self.tables(list(wanted))):
            same = [pc.fill_null(pc.equal(table[name], value), False) for name, value in wanted.items()]
            chosen = same[0] if len(same) == 1 else pc.and_(*same)
            yield from (group * ROWS + np.flatnonzero(chosen.to_numpy())).tolist()

    def _files(self, name: str) -> list[int]:
        return [n for n, path in enumerate(self.files) if path == name or path.endswith(f"/{name}")]

    def _one_file(self, name: str) -> int:
        """Return the number of the file with this path, or end of a path."""
        found = self._files(name)
        if len(found) == 1:
            return found[0]
        if found:
            some = " and ".join(self.files[n] for n in found[:2])
            raise InputError(
                f"{counted(len(found), 'file')} end in {name}: {some}", hint="give more of the path"
            )
        names = {path: path for path in self.files} | {Path(path).name: path for path in self.files}
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {names[close[0]]}?" if close else _meant(name, self.files)
        raise InputError(f"{name} is no number, URL or file of this dataset", hint=hint)

    @contextmanager
    def _read(self) -> Iterator[None]:
        """Turn what a damaged table raises into a DataError."""
        try:
            yield
        except (
            pa.ArrowException,
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            OSError,
            MemoryError,
        ) as error:
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
                raise read_error(error, self._path) from error
            hint = "prepare the dataset again, or copy it again from where it came"
            raise DataError(f"{self._path} or parse.json beside it is damaged: {error}", hint=hint) from error


def _meant(given: str, others: Sequence[str]) -> str:
    """Name the nearest of the others, or the first."""
    close = difflib.get_close_matches(given, others, n=1) or others[:1]
    return (
        f"did you mean {close[0]}?" if close else "`shoal dataset show` lists what the dataset was made from"
    )
