"""Cut the source files into ranges of work. Where a range ends never changes a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.data.prepare.kinds import has_pages
from shoal.data.prepare.parse import BLOCK, NAME_THE_KEY, NO_KEY, Format, first_bad_byte, parse_range
from shoal.data.prepare.sources import Segment, SourceFile, WorkRange
from shoal.errors import DataError

MIN_RANGE, MAX_RANGE = 1 << 20, 16 << 20
RANGES_WANTED = 64
_SCAN_BYTES = 1 << 20


def range_size(sources: list[SourceFile]) -> int:
    """Return bytes a range: small enough for an even load and a smooth progress bar, large enough to pay."""
    return min(max(sum(source.size for source in sources) // RANGES_WANTED, MIN_RANGE), MAX_RANGE)


def plan_ranges(
    sources: list[SourceFile], range_bytes: int, *, separator: str | None, cuttable: bool
) -> list[WorkRange]:
    """Cut all files into ranges of about `range_bytes`; small files share one, no range mixes roles."""
    ranges: list[WorkRange] = []
    group: list[Segment] = []
    group_bytes, role = 0, ""
    for number, source in enumerate(sources):
        for segment, num_bytes in _segments(number, source, range_bytes, separator, cuttable):
            if group and (role != source.role or group_bytes + num_bytes > range_bytes):
                ranges.append(WorkRange(len(ranges), role, group_bytes, tuple(group)))
                group, group_bytes = [], 0
            role = source.role
            group.append(segment)
            group_bytes += num_bytes
    if group:
        ranges.append(WorkRange(len(ranges), role, group_bytes, tuple(group)))
    return ranges


def _segments(
    number: int, source: SourceFile, range_bytes: int, separator: str | None, cuttable: bool
) -> Iterator[tuple[Segment, int]]:
    """Yield a file's segments, each with the number of bytes that it stands for."""
    if source.kind == "parquet":
        yield from _row_groups(number, source, range_bytes)
        return
    points: list[int] = []
    if source.size > range_bytes:
        if source.kind == "jsonl":
            points = list(range(range_bytes, source.size, range_bytes))
        elif source.kind == "text" and separator is not None:
            points = list(_separator_points(source, separator.encode(), range_bytes))
        elif source.kind == "text" and cuttable and first_bad_byte(Path(source.path)) is None:
            points = list(range(range_bytes, source.size, range_bytes))
    for start, end in zip([0, *points], [*points, source.size], strict=True):
        yield Segment(number, start, end), end - start


def _row_groups(number: int, source: SourceFile, range_bytes: int) -> Iterator[tuple[Segment, int]]:
    """Group a Parquet file's row groups by their share of its size."""
    import pyarrow.parquet as pq

    try:
        num_groups = pq.ParquetFile(source.path).metadata.num_row_groups
    except Exception as error:
        raise DataError(f"{source.path} is not a Parquet file: {error}", hint="leave it out") from error
    if not num_groups:
        return
    step = max(1, int(range_bytes * num_groups / max(source.size, 1)))
    for start in range(0, num_groups, step):
        end = min(start + step, num_groups)
        yield Segment(number, start, end), source.size * end // num_groups - source.size * start // num_groups


def _separator_points(source: SourceFile, separator: bytes, range_bytes: int) -> Iterator[int]:
    """Yield starts of documents about `range_bytes` apart; separators are found from the first byte on."""
    due, base, buffer = range_bytes, 0, b""
    with open(source.path, "rb") as file:
        while block := file.read(_SCAN_BYTES):
            buffer += block
            at = 0
            while (found := buffer.find(separator, at)) >= 0:
                at = found + len(separator)
                if due <= base + at < source.size:
                    yield base + at
                    due = base + at + range_bytes
            at = max(at, len(buffer) - len(separator) + 1)
            base, buffer = base + at, buffer[at:]


def limit_ranges(
    ranges: list[WorkRange],
    sources: Mapping[int, SourceFile],
    form: Format,
    limit: int,
    count: Callable[[WorkRange, Mapping[int, SourceFile], Format], int] | None = None,
) -> list[WorkRange]:
    """Keep what holds the first `limit` documents of the main text, and all other text.

    `count` returns the documents of a range, up to its limit, where they are not those of `parse_range`.
    """
    kept, left = [], limit
    for work in ranges:
        if work.role != "main":
            kept.append(work)
        elif left:
            found = (count or _count_documents)(replace(work, limit=left), sources, form)
            kept.append(replace(work, limit=left if found == left else None))
            left -= found
    return [replace(work, index=number) for number, work in enumerate(kept)]


def _count_documents(work: WorkRange, sources: Mapping[int, SourceFile], form: Format) -> int:
    """Count the documents that end in a range, up to its limit."""
    return sum(
        bool(text) and ends
        for batch in parse_range(work, sources, form)
        for text, ends in zip(batch.column("text").to_pylist(), batch.column("ends").to_pylist(), strict=True)
    )


def refuse_wrong_keys(sources: Sequence[SourceFile], form: Format) -> None:
    """Look at the first file of each role and kind: raise DataError where nothing in it is usable."""
    for source in {(source.role, source.kind): source for source in reversed(sources)}.values():
        _refuse_wrong_key(source, form)


def _refuse_wrong_key(source: SourceFile, form: Format) -> None:
    """Look at the start of a JSONL, CSV or Parquet file: raise DataError where nothing in it is usable."""
    if source.kind == "text" or has_pages(source.kind) or not source.size:
        return
    work = WorkRange(0, source.role, 0, (Segment(0, 0, 1 if source.kind == "parquet" else BLOCK),), limit=1)
    batch = next(parse_range(work, {0: source}, form), None)
    if batch is not None and batch.column("reason").null_count == 0:
        reason = batch.column("reason")[0].as_py()
        raise DataError(
            f"{source.path}: the first {len(batch):,} documents were all rejected: {reason}",
            hint=NAME_THE_KEY if reason.startswith(NO_KEY) else "correct the file, or leave it out",
        )
