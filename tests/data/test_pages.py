from __future__ import annotations

import gzip
import json
import sys
import zlib

import brotli
import pyarrow as pa
import pytest

from shoal.data.boundaries import AFTER_WORD
from shoal.data.prepare import read
from shoal.data.prepare.options import PrepareOptions
from shoal.data.prepare.parse import Format, Notes
from shoal.data.prepare.plan import plan_ranges
from shoal.data.prepare.read import document_batches
from shoal.data.prepare.sources import Segment, SourceFile, WorkRange, find_sources
from shoal.data.prepare.stages.documents import DOCUMENTS
from shoal.data.prepare.web.pages import MAX_PAGE, decode, pages_of
from shoal.errors import ConfigError, DataError
from tests.data.web_archive import record, response

PLAIN = Format("text", None, None, AFTER_WORD)
HTML = "<html><head><title>Grüße</title></head><body><p>Schöne Seite</p></body></html>".encode()
CHUNKS = b"%x\r\n%s\r\n" % (9, HTML[:9]) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(HTML) - 9, HTML[9:])


def archive(path, *records, each=True):
    """Write records; a .gz is compressed record by record, as crawlers do, or in one."""
    data = b"".join(records)
    if path.suffix == ".gz":
        data = b"".join(map(gzip.compress, records)) if each else gzip.compress(data)
    path.write_bytes(data)
    return path


def sources_of(*paths, pages=True, **options):
    return find_sources(
        PrepareOptions(tuple(map(str, paths)), paths[0].parent / "out", **options), pages=pages
    )


def documents(*paths, form=PLAIN, range_bytes=1 << 20, limit=None, **options):
    files, _ = sources_of(*paths, **options)
    ranges = plan_ranges(files, range_bytes, separator=form.separator, cuttable=False)
    found = []
    for work in ranges:
        work = WorkRange(work.index, work.role, work.num_bytes, work.segments, limit)
        for batch in document_batches(work, dict(enumerate(files)), form):
            assert batch.schema == DOCUMENTS
            found += batch.to_pylist()
    return found


def one_page(tmp_path, *args, **kwargs):
    (page,) = pages_of(str(archive(tmp_path / "one.warc", response("http://a/", *args, **kwargs))), "warc")
    return page


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (HTML, []),
        (CHUNKS, ["Transfer-Encoding: chunked"]),
        (HTML, ["Transfer-Encoding: chunked"]),  # the archive holds it without
        (gzip.compress(HTML), ["Content-Encoding: gzip"]),
        (HTML, ["Content-Encoding: gzip"]),
        (zlib.compress(HTML), ["Content-Encoding: deflate"]),
        (zlib.compress(HTML)[2:-4], ["Content-Encoding: deflate"]),
        (brotli.compress(HTML), ["Content-Encoding: br"]),
        (HTML, ["Content-Encoding: br"]),
        (bytes(pa.compress(HTML, "zstd")), ["Content-Encoding: zstd"]),
        (brotli.compress(gzip.compress(HTML)), ["Content-Encoding: gzip, br"]),
    ],
)
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_http_encodings_are_undone(tmp_path, body, headers, end):
    page = one_page(tmp_path, body, "Text/HTML; Charset='utf-8'", *headers, end=end)
    assert (page.body, page.reason, page.content_type, page.charset) == (HTML, None, "text/html", "utf-8")


BOMB = gzip.compress(b"<p>x</p>" * (MAX_PAGE // 4))


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((HTML,), {"status": 404}, "HTTP status"),
        ((HTML, "image/png"), {}, "not HTML or plain text"),
        ((HTML, ""), {}, "not HTML or plain text"),
        ((HTML, "text/html", "X: " + "x" * 50_000), {}, "damaged"),
        ((BOMB, "text/html", "Content-Encoding: gzip"), {}, "too large"),
        ((gzip.compress(BOMB), "text/html", "Content-Encoding: gzip, gzip"), {}, "too large"),
        (
            (brotli.compress(b"x" * 2 * MAX_PAGE, quality=1), "text/html", "Content-Encoding: br"),
            {},
            "too large",
        ),
        ((b"x" * (MAX_PAGE + 1),), {}, "too large"),
        ((gzip.compress(HTML)[:-9], "text/html", "Content-Encoding: gzip"), {}, "damaged"),
        ((CHUNKS[:-20], "text/html", "Transfer-Encoding: chunked"), {}, "damaged"),
        ((b"no brotli", "text/html", "Content-Encoding: br"), {}, "damaged"),
    ],
)
def test_unusable_response_has_a_reason_and_the_next_is_read(tmp_path, args, kwargs, reason):
    path = archive(tmp_path / "a.warc", response("http://a/", *args, **kwargs), response("http://b/", HTML))
    first, second = pages_of(str(path), "warc")
    assert (first.url, first.body, first.reason[0]) == ("http://a/", b"", reason)
    assert first.reason[1]
    assert (second.url, second.body, second.reason) == ("http://b/", HTML, None)


RECORDS = [
    record("warcinfo", "", b"software: test\r\n", "application/warc-fields"),
    record("request", "http://a/", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "application/http; msgtype=request"),
    response("http://a/", HTML),
    record("resource", "<http://b/>", HTML, "text/html; charset=utf-8"),
    record("metadata", "http://a/", b"x: y\r\n", "application/warc-fields"),
    record("conversion", "http://c/", b"Some words.", "text/plain"),
    record("response", "http://d/", b"no HTTP at all"),
]


@pytest.mark.parametrize(
    ("name", "each"),
    [("a.warc", True), ("a.warc.gz", True), ("a.warc.gz", False), ("dump", True)],
)
def test_every_kind_of_archive_gives_the_same_documents(tmp_path, name, each):
    """Offsets count decompressed bytes, so that they find the record in `gzip -dc` of any of them."""
    found = documents(archive(tmp_path / name, *RECORDS, each=each), range_bytes=64)
    starts = [sum(map(len, RECORDS[:n])) for n in (2, 3, 5, 6)]
    assert [row["offset"] for row in found] == starts
    assert [json.loads(row["meta"])["url"] for row in found] == [f"http://{name}/" for name in "abcd"]
    assert [row["page"] for row in found] == [HTML, HTML, None, None]
    assert [row["text"] for row in found] == [None, None, "Some words.", None]
    assert [row["reason"] for row in found] == [None, None, None, "HTTP status"]
    assert [row["stage"] for row in found] == [None, None, None, "pages"]


def test_archive_of_requests_alone_has_no_documents(tmp_path):
    assert documents(archive(tmp_path / "a.warc.gz", *RECORDS[:2])) == []


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
@pytest.mark.parametrize("cut", [5, 25, 150, 340])
def test_truncated_archive_is_an_error_that_names_it(tmp_path, name, cut):
    path = archive(tmp_path / name, *RECORDS)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=rf"{name} cannot be read to its end"):
        documents(path)


def test_damaged_archive_is_an_error_that_names_it(tmp_path):
    path = archive(tmp_path / "a.warc", *RECORDS[:3], b"junk\r\n\r\n", *RECORDS[3:])
    with pytest.raises(DataError, match=r"a\.warc cannot be read to its end"):
        documents(path)


@pytest.mark.parametrize(
    ("text", "encoding", "charset", "meta"),
    [
        ("Grüße aus Köln, schöne Straße", "utf-8", "iso-8859-1", ""),  # the server is wrong
        ("Grüße aus Köln, schöne Straße", "cp1252", "latin1", ""),
        ("Grüße aus Köln, schöne Straße", "cp1252", "utf-8", ""),
        ("Привет, это страница о погоде", "cp1251", None, "windows-1251"),
        ("Привет, это страница о погоде", "cp1251", "no-such-name", ""),
        ("日本語のページです。これは試験です。", "shift_jis", "Shift_JIS", ""),
        ("日本語のページです。これは試験です。", "euc_jp", "utf-8", ""),
        ("日本語のページです。これは試験です。", "iso2022_jp", None, "iso-2022-jp"),
        ("这是一个关于天气的网页。", "gb18030", None, "gb2312"),
        ("นี่คือหน้าเว็บเกี่ยวกับสภาพอากาศ", "cp874", "tis-620", ""),
        ("Grüße 日本語", "utf-16", None, ""),
        ("plain", "ascii", "unicode_escape", ""),
    ],
)
def test_charset_is_found(text, encoding, charset, meta):
    tag = f'<meta charset="{meta}">' if meta else ""
    html = f"<html><head>{tag}</head><body><p>{text}</p></body></html>"
    assert decode(html.encode(encoding), charset) == html


def test_few_wrong_bytes_do_not_change_the_charset():
    body = "äöü".encode() * 100
    assert decode(body + b"\xff", None) == "äöü" * 100 + "\ufffd"


def test_html_files_are_pages_only_where_pages_are_wanted(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.html", "b.HTM", "c.xhtml", "d.txt"):
        (folder / name).write_bytes(HTML)
    archive(folder / "e.warc.gz", *RECORDS)
    found, _ = sources_of(folder)
    assert [source.kind for source in found] == ["html", "html", "html", "text", "warc.gz"]
    found, passed_over = sources_of(folder, pages=False)
    assert [source.kind for source in found] == ["text"]
    assert passed_over == {".html file": 1, ".htm file": 1, ".xhtml file": 1, ".gz file": 1}
    assert [source.kind for source in sources_of(folder, ext=("html",), pages=False)[0]] == ["text"]
    assert [source.kind for source in sources_of(folder, ext=("html",))[0]] == ["html"]
    with pytest.raises(DataError, match=r"e\.warc\.gz is a web archive"):
        sources_of(folder / "e.warc.gz", pages=False)


def test_html_file_is_one_page(tmp_path):
    (tmp_path / "a.html").write_bytes(HTML.decode().encode("cp1252"))
    (tmp_path / "b.html").write_bytes(b" \n")
    (tmp_path / "c.html").write_bytes(b"x" * (MAX_PAGE + 1))
    first, second, third = documents(*(tmp_path / name for name in ("a.html", "b.html", "c.html")))
    assert (first["file"], first["offset"], first["page"], first["text"]) == (0, 0, HTML, None)
    assert [(row["stage"], row["reason"]) for row in (second, third)] == [
        ("pages", "empty"),
        ("pages", "too large"),
    ]


def test_text_is_read_as_whole_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "_MAX_TEXT", 1000)
    (tmp_path / "a.txt").write_text("word " * 200)
    (tmp_path / "b.txt").write_text("word " * 201)
    (tmp_path / "c.txt").write_bytes(b"bad \xff")
    lines = [
        {"text": "one", "url": "http://a/", "title": 3, "language": "en", "other": "x"},
        {"text": ""},
        {"text": "x" * 1001},
        {"tekst": "x"},
        {"text": "two", "title": "\ud800" * 3000},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{\n")
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt", "d.jsonl")]
    found, cut = documents(*paths), documents(*paths, range_bytes=100)
    assert [row["line"] for row in found] == [0, 0, 1, 1, 2, 3, 4, 5, 6]
    assert [{**row, "line": 0} for row in cut] == [{**row, "line": 0} for row in found]
    assert [row["text"] for row in found] == ["word " * 200, None, None, "one", None, None, None, "two", None]
    reasons = [None, "too large", "not UTF-8", None, "empty", "too large", "malformed", None, "not JSON"]
    assert [row["reason"] for row in found] == reasons
    assert [row["stage"] for row in found] == [reason and "read" for reason in reasons]
    assert found[6]["detail"] == "no key 'text'; keys seen: 'tekst'"
    assert json.loads(found[3]["meta"]) == {"url": "http://a/", "language": "en"}
    assert json.loads(found[7]["meta"]) == {"title": "?" * 2048}


def test_limit_counts_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "", "b", "c")))
    assert [row["text"] for row in documents(path, limit=2)] == ["a", None, "b"]


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastwarc.warc", None)
    with pytest.raises(ConfigError, match=r"fastwarc\.warc"):
        list(pages_of(str(archive(tmp_path / "a.warc", *RECORDS)), "warc"))


def test_progress_is_that_of_the_file(tmp_path):
    path = archive(tmp_path / "a.warc", *[response(f"http://{n}/", HTML * 999) for n in range(20)])
    notes, source = Notes(), SourceFile(str(path), "main", "warc", path.stat().st_size, 0)
    work = WorkRange(0, "main", source.size, (Segment(0, 0, source.size),))
    seen = [notes.read_bytes() for _ in document_batches(work, {0: source}, PLAIN, notes)]
    assert 0 < seen[0] < max(seen) <= source.size
