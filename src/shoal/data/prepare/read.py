"""The first stage of a chain: what a range's files hold becomes documents, whole ones and pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from shoal.data.prepare.kinds import has_pages
from shoal.data.prepare.parse import Format, Notes, TextRow, batched, segment_rows
from shoal.data.prepare.sources import Segment, SourceFile, WorkRange
from shoal.data.prepare.stages.documents import DOCUMENTS
from shoal.data.prepare.web.pages import PLAIN_TEXT, Page, decode, pages_of

READ, PAGES = "read", "pages"  # the stages that drop rejected lines, and pages that cannot be used
_MAX_TEXT = 32 << 20  # bytes of a .txt file, characters of any other document
_NAMED = ("not UTF-8", "not JSON", "not CSV", "not TSV")  # rejections that are counted apart


def document_batches(
    work: WorkRange, sources: Mapping[int, SourceFile], form: Format, notes: Notes | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the documents of a range as DOCUMENTS, about 0.5 MB or 4,096 rows a batch.

    A document is whole, so that a .txt file without separator must be one segment. Pages come as UTF-8 in
    `page`, plain text from the web in `text`. Rejected lines and empty documents are dropped in stage "read",
    pages that cannot be used in stage "pages". DataError names a file that is damaged.
    """
    notes, whole = notes or Notes(), replace(form, cut=None)
    rows = (
        {"file": segment.file, **row}
        for place, segment in enumerate(work.segments)
        for row in _documents(segment, sources[segment.file], whole, notes, place)
    )
    for batch in batched(rows, work.limit, _size, lambda row: _size(row) > 0):
        yield pa.RecordBatch.from_pylist(batch, schema=DOCUMENTS)


def count_documents(work: WorkRange, sources: Mapping[int, SourceFile], form: Format) -> int:
    """Count the documents of a range that are not dropped at once, up to its limit."""
    batches = document_batches(work, sources, form)
    return sum(batch.column("stage").null_count for batch in batches)


def _size(row: dict[str, Any]) -> int:
    return len(row.get("text") or row.get("page") or "")


def _documents(
    segment: Segment, source: SourceFile, form: Format, notes: Notes, place: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one segment."""
    if has_pages(source.kind):
        yield from map(_page_row, pages_of(source.path, source.kind, notes))
    elif source.kind == "text" and form.separator is None and source.size > _MAX_TEXT:
        yield _dropped(0, 0, READ, *_too_large(source.size))
    else:
        yield from map(_text_row, segment_rows(segment, source, form, notes, place))


def _text_row(row: TextRow) -> dict[str, Any]:
    """Turn a row of a text file into a document."""
    if row.text is None:
        phrase = (row.reason or "").partition(":")[0]
        return _dropped(row.offset, row.line, READ, phrase if phrase in _NAMED else "malformed", row.reason)
    if not row.text:
        return _dropped(row.offset, row.line, READ, "empty")
    if len(row.text) > _MAX_TEXT:
        return _dropped(row.offset, row.line, READ, *_too_large(len(row.text)))
    meta = json.dumps(row.facts, ensure_ascii=False) if row.facts else None
    return {"offset": row.offset, "line": row.line, "text": row.text, "meta": meta}


def _page_row(page: Page) -> dict[str, Any]:
    """Turn a page into a document."""
    meta = {"meta": json.dumps({"url": page.url}, ensure_ascii=False)} if page.url else {}
    if page.reason or not page.body.strip():
        return {**_dropped(page.offset, 0, PAGES, *(page.reason or ("empty", None))), **meta}
    text = decode(page.body, page.charset)
    content = {"text": text} if page.content_type == PLAIN_TEXT else {"page": text.encode()}
    return {"offset": page.offset, "line": 0, **content, **meta}


def _dropped(offset: int, line: int, stage: str, reason: str, detail: str | None = None) -> dict[str, Any]:
    return {"offset": offset, "line": line, "stage": stage, "reason": reason, "detail": detail}


def _too_large(size: int) -> tuple[str, str]:
    return "too large", f"{size / 1e6:,.1f} MB, more than {_MAX_TEXT >> 20} MiB"
