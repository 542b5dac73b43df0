"""Web pages as they lie in files: HTML, and the records of web archives (WARC, ISO 28500)."""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shoal.data.prepare.kinds import decompressed
from shoal.data.prepare.parse import Notes, naming_damage
from shoal.data.prepare.stages.documents import Reason, require

MAX_PAGE = 16 << 20  # bytes of a page, decompressed; a few kilobytes of gzip may hold gigabytes
PLAIN_TEXT = "text/plain"
_HTML = ("text/html", "application/xhtml+xml")
_MAX_URL = 2048
_MAX_ENCODINGS = 4
_MOST_WRONG = 0.05  # share of the bytes above 127 that may be wrong in an encoding
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([^\s\"';]+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"[0-9A-Fa-f]+[ \t]*(;[^\n]*)?\r?\n")
_ASCII = bytes(range(128))


@dataclass(frozen=True)
class Page:
    """One page; `reason` says why it cannot be used.

    `offset` is the byte at which its record begins, in the decompressed file; 0 in an HTML file. `charset` is
    the one that the server named.
    """

    offset: int
    url: str
    body: bytes
    content_type: str
    charset: str | None
    reason: Reason = None


def pages_of(path: str, kind: str, notes: Notes | None = None) -> Iterator[Page]:
    """Yield the pages of an HTML file or a web archive in their order; `notes` tell how far the reading is.

    Pages of an archive are its responses, resources and conversions. DataError where it is damaged.
    """
    with naming_damage(path), (notes or Notes()).watch(path) as raw:
        if kind == "html":
            yield _bounded(Page(0, "", raw.read(MAX_PAGE + 1), _HTML[0], None))
            return
        warc = require("fastwarc.warc")
        wanted = (warc.response, warc.resource, warc.conversion)
        for record in warc.ArchiveIterator(decompressed(raw, kind), parse_http=False, stream_detect=False):
            if not record.headers.get("Content-Length"):
                raise EOFError(f"the record at byte {record.stream_pos:,} has no length")
            if record.record_type in wanted:
                yield _bounded(_page(record))
            else:
                _payload(record)


def decode(body: bytes, charset: str | None) -> str:
    """Return a page's text: UTF-8 if it is that, else by the server's charset, a meta tag, or by detection.

    An encoding is passed over where more than 5 % of the bytes above 127 are wrong in it.
    """
    for bom, name in _BOMS.items():
        if body.startswith(bom):
            return body[len(bom) :].decode(name, "replace")
    allowed = _MOST_WRONG * len(body.translate(None, _ASCII))
    for name in filter(None, _encodings(body, charset)):
        text = body.decode(name, "replace")
        if text.count("\ufffd") <= allowed:
            return text
    return body.decode("utf-8", "replace")


def _encodings(body: bytes, charset: str | None) -> Iterator[str | None]:
    """Yield the encodings that a page may have, by Python's names, the most trusted first."""
    if not body.isascii():
        yield "utf-8"
    encoding = require("resiliparse.parse.encoding")
    yield encoding.map_encoding_to_html5(charset, False) if charset else None
    yield encoding.detect_encoding(body, from_html_meta=True)
    yield encoding.detect_encoding(body)


def _page(record: Any) -> Page:
    """Read one record."""
    url = (record.headers.get("WARC-Target-URI") or "").strip("<>")[:_MAX_URL]
    page = Page(record.stream_pos, url, b"", "", None)
    headers = record.headers
    if record.is_http:
        try:
            record.parse_http(quirks_mode=True)  # which takes line feeds alone, too
        except OSError as error:
            return replace(page, reason=("damaged", f"HTTP header: {error}"))
        headers = record.http_headers
    body = _payload(record)
    if record.is_http and headers.status_code != 200:
        return replace(page, reason=("HTTP status", str(headers.status_code or "none")))
    named = headers.get("Content-Type") or ""
    kind, found = named.partition(";")[0].strip().lower(), _CHARSET.search(named)
    if kind not in (*_HTML, PLAIN_TEXT):
        return replace(page, reason=("not HTML or plain text", kind[:100] or "no content type"))
    page = replace(page, body=body, content_type=kind, charset=found[1] if found else None)
    if len(body) > MAX_PAGE or not record.is_http:
        return page
    try:
        return replace(page, body=_decoded(body, headers))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        return replace(page, body=b"", reason=("damaged", str(error)[:200]))


def _payload(record: Any) -> bytes:
    """Return a record's payload, or a byte more than a page may have; EOFError where the file ends in it."""
    body: bytes = record.reader.read(MAX_PAGE + 1)
    if len(body) + record.reader.consume() < record.content_length:
        raise EOFError(f"it ends within the record at byte {record.stream_pos:,}")
    return body


def _bounded(page: Page) -> Page:
    """Give a page that is too large a reason."""
    if len(page.body) <= MAX_PAGE:
        return page
    return replace(page, body=b"", reason=("too large", f"more than {MAX_PAGE >> 20} MiB"))


def _decoded(body: bytes, headers: Any) -> bytes:
    """Undo the transfer and content encodings of an HTTP message; some archives hold it without them."""
    stream_io = require("fastwarc.stream_io")
    if "chunked" in (headers.get("Transfer-Encoding") or "").lower() and _CHUNKED.match(body):
        body = stream_io.ChunkedReader(io.BytesIO(body)).read(MAX_PAGE + 1)
    names = [name.strip() for name in (headers.get("Content-Encoding") or "").lower().split(",")]
    for name in reversed(names[:_MAX_ENCODINGS]):
        try:
            if name in ("gzip", "x-gzip"):
                body = _inflated(body, zlib.MAX_WBITS | 16)
            elif name == "deflate":  # with a zlib header, or without
                body = _inflated(body, zlib.MAX_WBITS if body[:1] == b"\x78" else -zlib.MAX_WBITS)
            elif name == "br":
                body = stream_io.BrotliReader(io.BytesIO(body)).read(MAX_PAGE + 1)
            elif name == "zstd":
                body = stream_io.ZstdReader(io.BytesIO(body)).read(MAX_PAGE + 1)
        except (OSError, zlib.error):
            if body.lstrip()[:1] != b"<":
                raise
    return body


def _inflated(body: bytes, wbits: int) -> bytes:
    """Decompress gzip or deflate, up to a byte more than a page may have."""
    stream = zlib.decompressobj(wbits)
    found = stream.decompress(body, MAX_PAGE + 1)
    if not stream.eof and len(found) <= MAX_PAGE:
        raise EOFError("its compressed data is cut short")
    return found
