"""Token files in Megatron's layout: `X.bin` holds all ids end to end, `X.idx` where each sequence lies."""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import xxhash

from shoal.errors import DataError
from shoal.runtime.files import disk_error, fsync, read_error, reading

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document marks
MAX_SEQUENCE = 2**31 - 1  # lengths are int32: a longer document becomes several sequences
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest dtype that Megatron's readers know for ids below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)


class IndexedWriter:
    """Stream documents into `X.bin`; `finish` writes `X.idx`. Both stay under temporary names until then."""

    def __init__(self, prefix: Path, dtype: np.dtype, max_sequence: int = MAX_SEQUENCE) -> None:
        self.bin_path, self.idx_path = (
            prefix.with_name(prefix.name + ".bin"),
            prefix.with_name(prefix.name + ".idx"),
        )
        self.dtype = dtype
        self.num_tokens = 0
        self.max_id = -1
        self._max_sequence = max_sequence
        self._lengths = array("i")
        self._marks = array("q", [0])
        self._open_tokens = 0  # of the document that has not ended yet
        self._hash = xxhash.xxh3_128()
        self._temporary = self.bin_path.with_name(f".{self.bin_path.name}.tmp")
        try:
            self._file = self._temporary.open("wb", buffering=1 << 20)
        except OSError as error:
            raise disk_error(error, self.bin_path) from error

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:  # closing flushes; the first error is the one to report
            if error is None:
                raise
        finally:
            self._temporary.unlink(missing_ok=True)

    @property
    def num_documents(self) -> int:
        """Return the number of documents that have ended."""
        return len(self._marks) - 1

    @property
    def between_documents(self) -> bool:
        """Tell whether no document is open."""
        return not self._open_tokens

    def append(self, tokens: np.ndarray) -> None:
        """Add 1-D `tokens` to the open document."""
        if not len(tokens):
            return
        self.max_id = max(self.max_id, int(tokens.max()))
        data = tokens.astype(self.dtype, copy=False).tobytes()
        self._hash.update(data)
        self.num_tokens += len(tokens)
        self._open_tokens += len(tokens)
        try:
            self._file.write(data)
        except OSError as error:
            raise disk_error(error, self.bin_path) from error

    def end_document(self) -> None:
        """Close the open document; one without tokens leaves no trace."""
        while self._open_tokens:
            length = min(self._open_tokens, self._max_sequence)
            self._lengths.append(length)
            self._open_tokens -= length
        if len(self._lengths) > self._marks[-1]:
            self._marks.append(len(self._lengths))

    def append_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add whole documents at once: `tokens` holds them end to end, `lengths` cuts them (all above 0)."""
        assert not self._open_tokens, self._open_tokens
        self.append(tokens)
        self._open_tokens = 0
        assert lengths.max(initial=0) <= self._max_sequence, lengths.max()
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        marks = np.arange(self._marks[-1] + 1, self._marks[-1] + 1 + len(lengths), dtype=np.int64)
        self._marks.frombytes(marks.tobytes())

    def finish(self) -> dict[str, object]:
        """End the last document, write the index, make both files durable and visible; return their facts."""
        self.end_document()
        try:
            self._file.flush()
            _sync(self._file)
            self._file.close()
            idx_hash = self._write_index()
            self._temporary.replace(self.bin_path)
            fsync(self.bin_path.parent)
        except OSError as error:
            raise disk_error(error, self.bin_path) from error
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "bin_bytes": self.num_tokens * self.dtype.itemsize,
            "bin_xxh3": self._hash.hexdigest(),
            "idx_bytes": self.idx_path.stat().st_size,
            "idx_xxh3": idx_hash,
        }

    def _write_index(self) -> str:
        """Write the index beside the tokens; return its hash."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        offsets = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], out=offsets[1:], dtype=np.int64)
        offsets *= self.dtype.itemsize
        marks = np.frombuffer(self._marks, dtype=np.int64)
        code = next(code for code, kind in _DTYPES.items() if kind == self.dtype.type)
        header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(marks))
        digest = xxhash.xxh3_128()
        temporary = self.idx_path.with_name(f".{self.idx_path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                for part in (header, lengths.data, offsets.data, marks.data):
                    file.write(part)
                    digest.update(part)
                file.flush()
                _sync(file)
            temporary.replace(self.idx_path)
        finally:
            temporary.unlink(missing_ok=True)
        return digest.hexdigest()


class IndexedReader:
    """Memory-map a pair of token files; DataError in a sentence where they do not fit together."""

    def __init__(self, prefix: Path) -> None:
        self.bin_path, self.idx_path = (
            prefix.with_name(prefix.name + ".bin"),
            prefix.with_name(prefix.name + ".idx"),
        )
        try:
            index_bytes, bin_bytes = self.idx_path.stat().st_size, self.bin_path.stat().st_size
            with self.idx_path.open("rb") as file:
                raw = file.read(HEADER.size)
        except FileNotFoundError as error:
            raise DataError(f"token file {error.filename} cannot be read: {error.strerror}") from error
        except OSError as error:
            raise read_error(error, self.idx_path) from error
        self.dtype, num_sequences, num_marks = self._read_header(raw)
        expected = HEADER.size + 12 * num_sequences + 8 * num_marks
        if index_bytes != expected:
            raise DataError(
                f"{self.idx_path} has {index_bytes:,} bytes; its header asks for {expected:,}: damaged"
            )
        with reading(self.idx_path):
            index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        at = HEADER.size
        self.lengths = index[at : at + 4 * num_sequences].view("<i4")
        at += 4 * num_sequences
        self.offsets = index[at : at + 8 * num_sequences].view("<i8")
        at += 8 * num_sequences
        self.document_marks = index[at:].view("<i8")
        if bin_bytes % self.dtype.itemsize:
            raise DataError(
                f"{self.bin_path} has {bin_bytes:,} bytes: not a multiple of {self.dtype.itemsize}"
            )
        self.tokens: np.ndarray = np.zeros(0, self.dtype)
        if bin_bytes:
            with reading(self.bin_path):
                self.tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r")

    def _read_header(self, raw: bytes) -> tuple[np.dtype, int, int]:
        """Return dtype, number of sequences and number of document marks."""
        if len(raw) < HEADER.size or not raw.startswith(MAGIC):
            raise DataError(f"{self.idx_path} is not a token index (it does not start with {MAGIC!r})")
        _, version, code, num_sequences, num_marks = HEADER.unpack(raw)
        if version != VERSION or code not in _DTYPES:
            raise DataError(
                f"{self.idx_path} has version {version} and dtype code {code}: damaged, or too new"
            )
        if num_marks < 1:
            raise DataError(f"{self.idx_path} marks no document start: damaged")
        return np.dtype(_DTYPES[code]), num_sequences, num_marks

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return len(self.document_marks) - 1

    def span(self, number: int) -> tuple[int, int]:
        """Return the first token of a document, and the first after it."""
        first, last = int(self.document_marks[number]), int(self.document_marks[number + 1])
        if not 0 <= first < last <= len(self.lengths):
            raise DataError(f"{self.idx_path} has no document {number} where it says so: damaged")
        start = int(self.offsets[first]) // self.dtype.itemsize
        return start, start + int(self.lengths[first:last].sum())

    def document(self, number: int) -> np.ndarray:
        """Return the ids of one document."""
        return self.tokens[slice(*self.span(number))]

    def check(self) -> None:
        """Read the whole index: lengths, offsets and marks must fit each other and the token file."""
        lengths = self.lengths.astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        ok = (
            (lengths > 0).all()
            and (self.offsets == starts * self.dtype.itemsize).all()
            and lengths.sum() == len(self.tokens)
            and self.document_marks[0] == 0
            and self.document_marks[-1] == len(lengths)
            and (np.diff(self.document_marks) > 0).all()
        )
        if not ok:
            raise DataError(f"{self.idx_path} does not describe {self.bin_path}: damaged")


def _sync(file: BinaryIO) -> None:
    """Push a file's bytes to the disk."""
    os.fsync(file.fileno())
