from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.extract import scores
from shoal.data.prepare.parse import Format
from shoal.data.prepare.read import document_batches
from shoal.data.prepare.sources import Segment, SourceFile, WorkRange
from shoal.data.prepare.stages import extract
from shoal.data.prepare.stages.documents import DOCUMENTS
from shoal.data.prepare.stages.extract import Extract
from shoal.data.prepare.web.child import Extractor
from shoal.errors import ConfigError
from tests.shared import SHARED

WEB = SHARED / "data/web"
ARTICLE = "The boats came back before noon, and the harbour was full of people who had waited since dawn. "
FAKE = """
import ctypes, os, re, time

def engine(favour):
    def run(html):
        if "sleep" in html: ctypes.PyDLL(None).sleep(600)  # in C, with the interpreter's lock
        if "spin" in html: re.match(r"(a+)+$", "a" * 64 + "b")
        if "segfault" in html: ctypes.string_at(0)
        if "memory" in html: bytearray(8 << 30)
        if "leave" in html: os._exit(3)
        if "raise" in html: raise ValueError(str(object()))
        print("noise", flush=True)
        return {"text": html.upper() + favour}
    return run
"""


def page(*paragraphs, head="", lang="en"):
    """Return a page with menu, banner and footer."""
    menu = "".join(f'<li><a href="/{n}">Menu {n}</a></li>' for n in range(9))
    body = "".join(f"<p>{text}</p>" for text in paragraphs)
    return (
        f'<html lang="{lang}"><head><title>Harbour news</title>{head}</head><body><nav><ul>{menu}</ul></nav>'
        f'<div class="cookie-banner">We use cookies</div><article><h1>Boats</h1>{body}</article>'
        "<footer>All rights reserved</footer></body></html>"
    )


def numbered(text):
    """Return paragraphs that differ."""
    return [f"{n}. {text * 3}" for n in range(4)]


def batch_of(*pages):
    rows = [
        {"file": 0, "offset": n, "line": 0, "page": html.encode() if isinstance(html, str) else html}
        for n, html in enumerate(pages)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=DOCUMENTS)


@pytest.fixture(scope="module", params=["trafilatura", "resiliparse"])
def stage(request):
    return Extract(engine=request.param, deadline_s=2).start()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put an engine that misbehaves on request in the place of trafilatura."""
    (tmp_path / "fake_engine.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setitem(extract.ENGINES, "trafilatura", "fake_engine:engine")
    return "fake_engine:engine"


def test_article_is_kept_and_boilerplate_is_not(stage):
    head = '<meta property="article:published_time" content="2024-05-06T07:08:09Z">'
    found = stage(batch_of(page(*numbered(ARTICLE), head=head, lang="en-GB"))).to_pylist()[0]
    assert [text for text in numbered(ARTICLE) if text.strip() not in found["text"]] == []
    assert not [word for word in ("Menu", "cookies", "rights") if word in found["text"]]
    assert json.loads(found["meta"]) == {"title": "Harbour news", "date": "2024-05-06", "language": "en"}
    assert found["page"] is None


@pytest.mark.parametrize(
    "text",
    [
        "船は正午前に戻り、港は夜明けから待っていた人々でいっぱいだった。",
        "船在中午之前回来了，港口挤满了等候的人。",
        "เรือกลับมาก่อนเที่ยง ท่าเรือเต็มไปด้วยผู้คน",
    ],
)
def test_text_without_spaces_between_words_is_kept(stage, text):
    found = stage(batch_of(page(*numbered(text), lang="ja"))).to_pylist()[0]
    assert [one for one in numbered(text) if one not in found["text"]] == []


HOSTILE = {
    "nested": "<html><body>" + "<div>" * 100_000 + ARTICLE + "</div>" * 100_000,
    "spans": "<html><body><p>" + "<span>" * 100_000 + ARTICLE,
    "attribute": f'<html><body><div title="{"x" * 3_000_000}"></div><p>{ARTICLE}</p></body></html>',
    "tags": "<html><body>" + "<b><i>" * 50_000 + "</body></html>",
    "table": "<html><body>" + "<table><tr><td>" * 5000 + ARTICLE,
    "entities": "<html><body><p>" + "&#xD800;&#0;&bogus;" * 1000 + ARTICLE + "</p></body></html>",
    "no text": "<html><body><script>var x = 1;</script></body></html>",
    "no page": "\x00\x01\x02",
    "too large": "<html><body><p>" + "x " * (2 << 20),
}


def test_every_hostile_page_ends_in_text_or_a_reason(stage):
    after = page(*numbered(ARTICLE))
    rows = stage(batch_of(*HOSTILE.values(), after)).to_pylist()
    assert all((row["text"] is None) == (row["reason"] is not None) for row in rows)
    assert all(row["stage"] == (row["reason"] and "extract") and row["page"] is None for row in rows)
    by_name = dict(zip(HOSTILE, rows, strict=False))
    assert (by_name["no text"]["reason"], by_name["too large"]["reason"]) == ("no text", "too large")
    assert by_name["attribute"]["text"].strip().endswith(ARTICLE.strip())
    assert ARTICLE.strip() in rows[-1]["text"]


def test_misbehaving_engine_costs_that_page_only(fake):
    pages = ["a", "sleep", "b", "spin", "c", "segfault", "d", "leave", "e", "raise", "f", "memory", "g"]
    began = time.monotonic()
    rows = Extract(deadline_s=0.5).start()(batch_of(*pages)).to_pylist()
    assert time.monotonic() - began < 200
    assert [row["text"] for row in rows[::2]] == [f"{letter}balanced" for letter in "ABCDEFG"]
    assert [(row["reason"], row["detail"]) for row in rows[1::2]] == [
        ("extraction too slow", "more than 0.5 s"),
        ("extraction too slow", "more than 0.5 s"),
        ("extraction crashed", f"signal {signal.SIGSEGV.value}"),
        ("extraction crashed", "exit"),
        ("extraction failed", "ValueError"),
        ("extraction failed", "MemoryError"),
    ]


def test_child_that_is_killed_from_outside_costs_no_page(fake):
    extractor = Extractor(fake, "balanced", 5)
    os.kill(extractor._child.pid, signal.SIGKILL)
    assert extractor.run(b"a") == {"text": "Abalanced"}


def test_documents_without_a_page_pass_unchanged(fake):
    rows = [{"file": 0, "offset": 0, "line": 1, "text": "x"}, {"stage": "read", "reason": "empty"}]
    batch = pa.RecordBatch.from_pylist(rows, schema=DOCUMENTS)
    both = pa.RecordBatch.from_pylist([*rows, {"page": b"y", "meta": '{"url": "u"}'}], schema=DOCUMENTS)
    stage = Extract(favour="recall").start()
    assert stage(batch) is batch
    assert stage(both).to_pylist()[:2] == batch.to_pylist()
    assert stage(both).to_pylist()[2]["text"] == "Yrecall"
    assert stage(both).to_pylist()[2]["meta"] == '{"url": "u"}'


def test_child_dies_with_its_parent(fake):
    script = f"""
import os, signal
from shoal.data.prepare.web.child import Extractor
signal.signal(signal.SIGALRM, signal.SIG_IGN)  # which a child inherits
idle, busy = (Extractor({fake!r}, "balanced", 0.5) for _ in range(2))
print(idle._child.pid, busy._child.pid, flush=True)
busy.run(b"sleep")
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    children = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(0.2)
    parent.kill()
    parent.communicate()
    assert len(children) == 2
    until = time.monotonic() + 60
    while any(is_alive(pid) for pid in children):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_missing_package_is_an_error_before_any_page(monkeypatch, tmp_path):
    (tmp_path / "trafilatura.py").write_text("raise ImportError('nothing here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ConfigError, match="nothing here") as caught:
        Extract().start()
    assert "shoal[web]" in caught.value.hint


def texts_of(stage, folder):
    """Return {name: row} of the pages in a folder."""
    paths = sorted(folder.iterdir())
    files = {n: SourceFile(str(path), "main", "html", path.stat().st_size, 0) for n, path in enumerate(paths)}
    work = WorkRange(0, "main", 1, tuple(Segment(n, 0, file.size) for n, file in files.items()))
    batches = document_batches(work, files, Format("text", None, None, None))
    return {paths[row["file"]].name: row for batch in batches for row in stage(batch).to_pylist()}


@pytest.mark.skipif(not WEB.is_dir(), reason=f"{WEB} is not there")
def test_real_pages_are_extracted_as_well_as_by_the_library_itself():
    import trafilatura

    gold = json.loads((WEB / "gold.json").read_text())
    rows = texts_of(Extract().start(), WEB / "pages")
    assert set(gold) <= set(rows)
    assert all((row["text"] is None) == (row["reason"] is not None) for row in rows.values())
    ours = scores({name: row["text"] or "" for name, row in rows.items()}, gold)
    own = {name: trafilatura.extract((WEB / "pages" / name).read_bytes()) or "" for name in gold}
    theirs = scores(own, gold)
    assert all(ours[name] >= theirs[name] > 0.9 for name in "PRF"), (ours, theirs)
    assert sum(bool(json.loads(row["meta"] or "{}").get("title")) for row in rows.values()) == len(rows)


def test_text_of_a_page_does_not_depend_on_those_before_it():
    """Also where pages share paragraphs: the library counts them if it is asked to remove duplicates."""
    pages = [page(*[ARTICLE * 3] * 3, f"Only here: {n}. {ARTICLE}") for n in range(6)]
    if WEB.is_dir():
        pages += [path.read_text(errors="replace") for path in sorted((WEB / "pages").iterdir())[:20]]
    stage = Extract().start()
    texts = stage(batch_of(*pages)).column("text").to_pylist()
    assert all(texts)
    assert stage(batch_of(*reversed(pages))).column("text").to_pylist() == texts[::-1]
    again = Extract().start()
    assert again(batch_of(*pages[-1:])).column("text").to_pylist() == texts[-1:]
