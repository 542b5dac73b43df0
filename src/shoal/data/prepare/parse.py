"""The first stage: the bytes of one range become rows of text. A bad line becomes a row with a reason."""

from __future__ import annotations

import codecs
import csv
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa

from shoal.data.boundaries import Boundary
from shoal.data.prepare.kinds import decompressed
from shoal.data.prepare.sources import Segment, SourceFile, WorkRange
from shoal.errors import DataError

BATCH_BYTES = 1 << 19
BATCH_ROWS = 4096
BLOCK = 1 << 18
_CONTEXT = 8  # bytes around a cut that a rule may look at
_PIECE = 4 << 20  # of a document that spans more than one row
_MAX_LINE = 32 << 20  # bytes of a JSON line; what is longer becomes a refusal
_MAX_FIELD = 16 << 20  # characters of a CSV field; its reader takes four bytes for each
_ENDLESS = 256 << 20  # bytes of a line at which a file is given up
_MAX_BLANK = 1 << 18  # lines without text, one after the other
_MAX_PACKED = 256  # how many times its size in a file a Parquet column may take; text takes 3 to 20
_MAX_REPEATED = 16  # how many times the size of the whole column its texts may have, written out
_SMALL = 32 << 20  # characters that it may take in any case
NAME_THE_KEY = "name the key or column that holds the text with --text-key, or choose other files with --ext"
NO_KEY = "no key"
_BOM = b"\xef\xbb\xbf"
_FACTS = ("url", "title", "date", "language")  # keys of a JSON line that are kept beside its text
_MAX_FACT = 2048  # characters of one

# A row is a document, a piece of one (`starts`, `ends` tell which), or a refusal (`reason`, no `text`).
# (file, offset) is the document's identity: a byte for text and JSONL, a record for CSV, a row for Parquet.
PARSED = pa.schema(
    [
        ("file", pa.int32()),
        ("offset", pa.int64()),
        ("line", pa.int64()),  # counted from 1 at the start of the segment; 0 where a file has no lines
        ("starts", pa.bool_()),
        ("ends", pa.bool_()),
        ("text", pa.large_string()),
        ("reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class Format:
    """How text lies in the files; `cut` is the tokenizer's rule for pieces of long documents."""

    text_key: str
    delim: str | None
    separator: str | None
    cut: Boundary | None


@dataclass(frozen=True)
class TextRow:
    """One row of PARSED without its file. `facts` are what a JSON line says about its text."""

    offset: int
    line: int
    text: str | None
    reason: str | None
    starts: bool = True
    ends: bool = True
    facts: dict[str, str] | None = None


Row = TypeVar("Row")


@dataclass
class Notes:
    """What a reader tells while it works: the number of lines of each segment, and the file it has open."""

    lines: dict[int, int] = field(default_factory=dict)
    stream: BinaryIO | None = None

    @contextmanager
    def watch(self, path: str) -> Iterator[BinaryIO]:
        """Open a file whose position is worth knowing."""
        with open(path, "rb") as self.stream:
            yield self.stream
        self.stream = None

    def read_bytes(self) -> int:
        """Return how far the open file is read; 0 where none is."""
        return self.stream.tell() if self.stream and not self.stream.closed else 0


def parse_range(
    work: WorkRange, sources: Mapping[int, SourceFile], form: Format, notes: Notes | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range, about 0.5 MB a batch; `notes` tell how far the reading is."""
    notes = notes or Notes()
    rows = (
        (segment.file, row)
        for place, segment in enumerate(work.segments)
        for row in segment_rows(segment, sources[segment.file], form, notes, place)
    )
    for batch in batched(
        rows, work.limit, lambda r: len(r[1].text or ""), lambda r: bool(r[1].text) and r[1].ends
    ):
        yield _to_batch(batch)


def batched(
    rows: Iterable[Row], limit: int | None, size: Callable[[Row], int], is_document: Callable[[Row], bool]
) -> Iterator[list[Row]]:
    """Group rows into batches of about 0.5 MB; stop after `limit` documents."""
    batch: list[Row] = []
    num_bytes = documents = 0
    for row in rows:
        batch.append(row)
        num_bytes += size(row)
        documents += is_document(row)
        if num_bytes >= BATCH_BYTES or len(batch) >= BATCH_ROWS:
            yield batch
            batch, num_bytes = [], 0
        if documents == limit:
            break
    if batch:
        yield batch


def _to_batch(rows: list[tuple[int, TextRow]]) -> pa.RecordBatch:
    """Build one Arrow batch."""
    columns = [
        [file for file, _ in rows],
        *([getattr(row, name) for _, row in rows] for name in PARSED.names[1:]),
    ]
    arrays = [pa.array(values, kind) for values, kind in zip(columns, PARSED.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=PARSED)


def segment_rows(
    segment: Segment, source: SourceFile, form: Format, notes: Notes, place: int
) -> Iterator[TextRow]:
    """Choose the reader for a file's kind; `place` is the segment's in its range."""
    with naming_damage(source.path):
        if source.kind == "text":
            whole = form.separator is None
            yield from _one_text(segment, source, form) if whole else _separated(segment, source, form)
        elif source.kind == "csv":
            yield from _csv_rows(source, form, notes)
        elif source.kind == "parquet":
            yield from _parquet_rows(segment, source, form)
        else:
            yield from _json_rows(segment, source, form, notes, place)


@contextmanager
def naming_damage(path: str) -> Iterator[None]:
    """Turn what a reader raises in the middle of a file into a DataError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read to its end: {error}",
            hint="it is cut short or damaged: copy it again, or leave it out",
        ) from error


def _one_text(segment: Segment, source: SourceFile, form: Format) -> Iterator[TextRow]:
    """Read a file that is one document, or the part of it that this segment stands for."""
    whole = segment.start == 0 and segment.end == source.size
    bad = first_bad_byte(Path(source.path)) if whole else None  # cut files were checked when they were cut
    if bad is not None:
        yield TextRow(0, *_refusal(source.path, bad))
        return
    with open(source.path, "rb") as file:
        start = _cut_from(file, segment.start, source.size, form.cut)
        end = _cut_from(file, segment.end, source.size, form.cut)
        file.seek(start)
        data = file.read(end - start)
    skip = len(_BOM) if start == 0 and data.startswith(_BOM) else 0
    if start == 0 and len(data) == skip:
        yield TextRow(0, 0, "", None)
        return
    at = skip
    while at < len(data):
        found = form.cut.find(data, at + _PIECE) if form.cut else None
        stop = len(data) if found is None else found
        first, last = start + at == skip, start + stop == source.size
        begin = at if first or form.cut is None else at + form.cut.skip
        yield TextRow(start + at, 0, data[begin:stop].decode(), None, starts=first, ends=last)
        at = stop


def first_bad_byte(path: Path) -> int | None:
    """Return where a file stops being UTF-8, None where it is UTF-8 throughout; reads a block at a time."""
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK)
            held = len(decoder.getstate()[0])  # bytes of a character that the last block cut in two
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return at - held + error.start
            if not block:
                return None
            at += len(block)


def _refusal(path: str, bad: int) -> tuple[int, None, str]:
    """Return (line, no text, reason) for a file whose byte at `bad` is not UTF-8."""
    line, left = 1, bad
    with open(path, "rb") as file:
        head = file.read(2)
        file.seek(0)
        while block := file.read(min(BLOCK, left)):
            line, left = line + block.count(b"\n"), left - len(block)
        byte = file.read(1)
    return line, None, _not_utf8(head, byte[0], bad)


def _cut_from(file: BinaryIO, place: int, size: int, cut: Boundary | None) -> int:
    """Return the first place from `place` on where the text may be cut; it depends on nothing else."""
    if place in (0, size):
        return place
    assert cut is not None
    begin = max(0, place - _CONTEXT)
    file.seek(begin)
    buffer, at = b"", place - begin
    while block := file.read(BLOCK):
        buffer += block
        found = cut.find(buffer, at)
        if found is not None:
            return begin + found
        drop = max(0, len(buffer) - 2 * _CONTEXT)
        begin, buffer, at = begin + drop, buffer[drop:], max(at - drop, min(at, _CONTEXT))
    return size


def _separated(segment: Segment, source: SourceFile, form: Format) -> Iterator[TextRow]:
    """Read the documents of a text file that a separator divides."""
    assert form.separator is not None
    mark = form.separator.encode()
    with open(source.path, "rb") as file:
        file.seek(segment.start)
        data = file.read(segment.end - segment.start)
    at = len(_BOM) if segment.start == 0 and data.startswith(_BOM) else 0
    for part in data[at:].split(mark):
        text, reason = _decode(part, segment.start + at)
        if part or at < len(data):  # the file's last separator opens no document
            yield TextRow(segment.start + at, 0, text, reason)
        at += len(part) + len(mark)


def _json_rows(
    segment: Segment, source: SourceFile, form: Format, notes: Notes, place: int
) -> Iterator[TextRow]:
    """Read the JSON lines that start inside the segment."""
    last = 0  # line with something in it
    for number, (offset, line) in enumerate(_lines(segment, source, notes), start=1):
        notes.lines[place] = number
        if number - last > _MAX_BLANK:
            raise DataError(
                f"{source.path} has more than {_MAX_BLANK:,} blank lines one after the other",
                hint="leave the file out, or remove them",
            )
        if line.strip():
            last = number
            text, reason, facts = _json_text(line, offset, form.text_key)
            yield TextRow(offset, number, text, reason, facts=facts)


def _lines(segment: Segment, source: SourceFile, notes: Notes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of each line that starts inside the segment; offsets count decompressed bytes."""
    with notes.watch(source.path) as raw, decompressed(raw, source.kind) as file:
        offset = segment.start
        if offset:
            file.seek(offset - 1)
            offset += _read_line(file, source)[1] - 1
        while source.kind != "jsonl" or offset < segment.end:
            line, length = _read_line(file, source)
            if not line:
                return
            if offset == 0 and line.startswith(_BOM):
                line = line[len(_BOM) :]
                offset, length = len(_BOM), length - len(_BOM)
            yield offset, line
            offset += length


def _read_line(file: BinaryIO, source: SourceFile) -> tuple[bytes, int]:
    """Return the next line, or more of it than is allowed, and its length; no more than that is in memory.

    A few kilobytes of a packed file may be one line without end.
    """
    line = file.readline(_MAX_LINE + 1)
    length, whole = len(line), line.endswith(b"\n")
    while len(line) > _MAX_LINE and not whole and (more := file.readline(BLOCK)):
        length += len(more)
        if length > _ENDLESS:
            raise DataError(
                f"{source.path} has a line of more than {_ENDLESS >> 20} MiB",
                hint="one JSON object a line is needed; leave the file out, or divide it",
            )
        whole = more.endswith(b"\n")
    return line, length


def _json_text(line: bytes, offset: int, key: str) -> tuple[str | None, str | None, dict[str, str] | None]:
    """Return (text, None, facts beside it) or (None, why not, None) of one JSON line."""
    if len(line) > _MAX_LINE:
        return None, f"a line of more than {_MAX_LINE >> 20} MiB", None
    try:
        value = json.loads(line.decode())  # given bytes, it would guess at UTF-16 and UTF-32
    except UnicodeDecodeError as error:
        return None, _not_utf8(line, line[error.start], offset + error.start), None
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}", None
    if not isinstance(value, dict):
        return None, f"not a JSON object but {type(value).__name__}", None
    if key not in value:
        return None, no_key(key, list(value)), None
    facts = {name: value[name] for name in _FACTS if name != key and isinstance(value.get(name), str)}
    cut = {name: fact[:_MAX_FACT].encode(errors="replace").decode() for name, fact in facts.items()}
    return *_check_text(value[key], key), cut or None


def _csv_rows(source: SourceFile, form: Format, notes: Notes) -> Iterator[TextRow]:
    """Read a CSV or TSV file with a header row, record by record."""
    csv.field_size_limit(_MAX_FIELD)  # an open quote may make one field of the rest of a file
    delim = form.delim or ("\t" if source.path.lower().endswith(".tsv") else ",")
    with notes.watch(source.path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(_short_lines(text, source), delimiter=delim)
        column = csv_column(next(reader, []), source, form.text_key)
        record = 0
        while True:
            record, line = record + 1, reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield TextRow(record, line, None, f"not {'TSV' if delim == chr(9) else 'CSV'}: {error}")
                continue
            if not fields:
                continue
            if column >= len(fields):
                yield TextRow(
                    record, line, None, f"{len(fields)} fields; {form.text_key!r} is field {column + 1}"
                )
                continue
            yield TextRow(record, line, *_check_text(fields[column], form.text_key))


def _short_lines(text: io.TextIOWrapper, source: SourceFile) -> Iterator[str]:
    while line := text.readline(_MAX_LINE + 1):
        if len(line) > _MAX_LINE:
            raise DataError(
                f"{source.path} has a line of more than {_MAX_LINE >> 20} MiB", hint="leave the file out"
            )
        yield line


def csv_column(header: list[str], source: SourceFile, key: str) -> int:
    """Return the place of the text column; DataError with the columns seen where it is missing."""
    if key not in header:
        raise DataError(f"{source.path}: {no_key(key, header)}", hint=NAME_THE_KEY)
    return header.index(key)


def _parquet_rows(segment: Segment, source: SourceFile, form: Format) -> Iterator[TextRow]:
    """Read the text column of some row groups."""
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source.path)
        if form.text_key not in file.schema_arrow.names:
            raise DataError(
                f"{source.path}: {no_key(form.text_key, file.schema_arrow.names)}", hint=NAME_THE_KEY
            )
        kind = file.schema_arrow.field(form.text_key).type
        if not _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
            raise DataError(f"{source.path}: column {form.text_key!r} is {kind}, not text", hint=NAME_THE_KEY)
        first = sum(file.metadata.row_group(group).num_rows for group in range(segment.start))
        groups = list(range(segment.start, segment.end))
        allowed = _refuse_packed(file.metadata, groups, source, form.text_key)
        # A value that is held once for many rows shall come once for them.
        file = pq.ParquetFile(source.path, metadata=file.metadata, read_dictionary=[form.text_key])
        for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[form.text_key]):
            for number, value in enumerate(_strings(batch.column(0)), start=first):
                allowed -= len(value or "")
                if allowed < 0:
                    raise DataError(
                        f"{source.path}: column {form.text_key!r} repeats a text too many times",
                        hint="leave the file out",
                    )
                yield TextRow(number, 0, *_check_text(value, form.text_key))
            first += batch.num_rows
    except pa.ArrowException as error:
        raise DataError(f"{source.path} is damaged: {error}", hint="leave it out or copy it again") from error


def _refuse_packed(metadata: Any, groups: list[int], source: SourceFile, key: str) -> int:
    """Return how many characters the text column may give; DataError where a page would fill the memory."""
    whole = 0
    for group in map(metadata.row_group, groups):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema != key:
                continue
            size, packed = column.total_uncompressed_size, column.total_compressed_size
            whole += size
            if size > max(_SMALL, _MAX_PACKED * packed):
                raise DataError(
                    f"{source.path}: column {key!r} unpacks from {packed:,} to {size:,} bytes",
                    hint="leave the file out, or write it again in smaller row groups",
                )
    return max(_SMALL, _MAX_REPEATED * whole)


def _is_text(kind: pa.DataType) -> bool:
    """Tell whether a column holds strings, or bytes that may be some."""
    known = (
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
    )
    return kind in known


def _strings(column: pa.Array) -> Iterator[str | None]:
    """Yield a text column's values; bytes that are not UTF-8 come as lone surrogates, refused later."""
    if not pa.types.is_dictionary(column.type):
        places, values = range(len(column)), column
    else:
        places, values = column.indices.to_pylist(), column.dictionary
    values = values.cast(pa.large_binary())
    for place in places:
        raw = None if place is None else values[place].as_py()
        yield None if raw is None else raw.decode(errors="surrogateescape")


def _decode(data: bytes, offset: int) -> tuple[str | None, str | None]:
    """Return (text, None), or (None, why not) where the bytes are not UTF-8."""
    try:
        return data.decode(), None
    except UnicodeDecodeError as error:
        return None, _not_utf8(data, data[error.start], offset + error.start)


def _check_text(value: Any, key: str) -> tuple[str | None, str | None]:
    """Return (text, None) or (None, why this value is no text)."""
    if not isinstance(value, str):
        return None, f"{key!r} is {'null' if value is None else type(value).__name__}, not a string"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bad = ord(value[error.start])
        what = f"byte 0x{bad - 0xDC00:02x}" if 0xDC80 <= bad <= 0xDCFF else f"lone surrogate U+{bad:04X}"
        return None, f"not UTF-8: {what} at character {error.start}"
    return value, None


def _not_utf8(head: bytes, byte: int, offset: int) -> str:
    """Say where bytes stop being UTF-8; UTF-16 is named, the usual mistake."""
    known = " (it looks like UTF-16: convert it first)" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    return f"not UTF-8: byte 0x{byte:02x} at offset {offset}{known}"


def no_key(key: str, seen: list[str]) -> str:
    """Say that a text key is missing, and which keys there are."""
    names = ", ".join(ascii(str(name)[:60]) for name in seen[:10]) or "none"
    return f"{NO_KEY} {key!r}; keys seen: {names}"
