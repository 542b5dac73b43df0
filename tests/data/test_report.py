"""`report.html` of a dataset: what it says, hostile texts, a browser; samples of what was dropped."""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
from html.parser import HTMLParser

import pytest

from shoal.data.prepare.decisions import Decisions
from shoal.data.prepare.report import _Totals, report_page, write_report
from shoal.data.prepare.samples import Samples
from shoal.data.prepare.stages.documents import dropped
from tests.cases import every
from tests.data.documents import batch_of, dataset_of, decided

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = (
    "</blockquote><script>console.error(1)</script><img src=x onerror=alert(1)>{{7*7}}$\\frac{$\u202e&amp;"
)
ROWS = [
    *[{"chars": 1000 + 100 * n, "language": "en", "split": 0, "position": n} for n in range(6)],
    *[{"chars": 90, "language": "en", "stage": "length", "reason": "too short"} for _ in range(3)],
    {"chars": 3000, "language": "de", "cluster": 2, "split": 0, "position": 6},
    {"chars": 3000, "language": "de", "cluster": 2, "stage": "near", "reason": "near-duplicate", "twin": 9},
    {"stage": "fetch", "reason": "status 404"},
]
LINEAGE = [
    {"stage": "fetch", "settings": {"timeout_s": 10}},
    {"stage": "dedup"},  # of which near is a part
    {"stage": "length", "settings": {"min_tokens": 128, "tokenizer": HOSTILE}},
]
SAMPLES = {
    "length: too short": [{"doc": 6, "text": HOSTILE}, {"doc": 7, "text": "天地 " * 100}],
    "fetch: status 404": [{"doc": 11, "text": ""}],
}


@pytest.fixture
def folder(tmp_path):
    return dataset_of(tmp_path / "set", decided(ROWS), train=["a"] * 7)


@pytest.fixture
def page(folder):
    return report_page(folder, f"mine {HOSTILE}", {"lineage": LINEAGE}, SAMPLES)


class Reader(HTMLParser):
    """Collects tags, and the words in each table cell, heading, quotation and sentence."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.words, self._open = [], {}, []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "link"):
            self._open.append(tag)
            self.words.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.words[self._open[-1]][-1] += data


def test_sentences_are_computed(page):
    words = Reader(page).words
    answer = "7 of 12 documents (58.3%) are kept. The most frequent reason to drop one is length: too short "
    assert f"{answer}(25.0%)." in words["p"]
    assert "The stage length drops the most documents: 3 of 12 (25.0%)." in words["p"]
    assert (
        "Of the documents with text, half of those kept have fewer than 2,048 characters; "
        "half of those dropped have fewer than 128 characters." in words["p"]
    )
    assert "81.8% of the documents with text have the language en." in words["p"]
    assert "2 documents lie in clusters of near-duplicates; the largest cluster has 2." in words["p"]


def test_the_funnel_lists_stages_in_the_order_of_the_chain(page):
    cells = Reader(page).words["td"]
    rows = [cells[n : n + 5] for n in range(0, 20, 5)]
    assert rows == [
        ["fetch", "1", "8.3%", "0", "status 404"],
        ["near", "1", "8.3%", "3,000", "near-duplicate"],
        ["length", "3", "25.0%", "270", "too short"],
        ["kept", "7", "58.3%", "10,500", ""],
    ]
    assert cells[20:23] == ["fetch", "timeout_s", "10"]


def test_the_page_stands_alone_and_texts_are_escaped(page):
    read = Reader(page)
    tags = {tag for tag, _ in read.tags}
    assert not tags & {"script", "iframe", "object", "form"}
    assert all(not name.startswith("on") for _, attrs in read.tags for name in attrs)
    places = [attrs.get("src") or attrs.get("href") or "data:" for _, attrs in read.tags]
    assert all(place.startswith("data:") for place in places)
    assert read.words["blockquote"] == ["(no text)", HOSTILE, "天地 " * 100]
    pictures = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(pictures) == 4
    assert all(b"<script" not in base64.b64decode(one) for one in pictures)


def test_the_same_facts_give_the_same_page(page, folder):
    assert page == report_page(
        folder, f"mine {HOSTILE}", {"lineage": LINEAGE}, dict(reversed(SAMPLES.items()))
    )


def test_a_table_without_documents_is_a_page(tmp_path):
    folder = dataset_of(tmp_path / "set", decided([]), train=["a"])
    page = report_page(folder, "mine", {"lineage": []}, {})
    assert "0 of 0 documents (0.0%) are kept." in page
    assert "<img" not in page


def test_hostile_names_in_the_table_are_escaped(tmp_path):
    rows = [{"stage": HOSTILE, "reason": HOSTILE, "language": HOSTILE, "chars": 5, "cluster": 1}]
    folder = dataset_of(tmp_path / "set", decided(rows), train=["a"])
    tags = {tag for tag, _ in Reader(report_page(folder, "mine", {"lineage": []}, {})).tags}
    assert "script" not in tags


def test_totals_do_not_depend_on_row_groups(tmp_path, monkeypatch):
    from shoal.data.prepare import decisions

    whole = _Totals(Decisions(dataset_of(tmp_path / "a", decided(ROWS), train=["a"])))
    monkeypatch.setattr(decisions, "ROWS", 5)
    parts = _Totals(Decisions(dataset_of(tmp_path / "b", decided(ROWS), train=["a"])))
    assert vars(whole) == vars(parts)


@pytest.mark.parametrize("width", every(2, [360, 1280]))
def test_a_browser_shows_it_without_overflow_errors_or_missing_pictures(folder, width):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the report was not opened")
    from playwright.sync_api import sync_playwright

    assert write_report(folder, f"mine {HOSTILE}" + "x" * 300, {"lineage": LINEAGE}, SAMPLES) == ""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, words = browser.new_page(viewport={"width": width, "height": 800}), []
        page.on("console", lambda message: words.append(message.text))
        page.on("pageerror", lambda error: words.append(str(error)))
        page.on("dialog", lambda dialog: words.append(dialog.message))
        page.goto((folder / "report.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == width
        loaded = page.evaluate("[...document.images].map(one => one.complete && one.naturalWidth > 100)")
        assert (len(loaded), all(loaded)) == (4, True)
        assert words == []
        browser.close()


def test_without_its_packages_there_is_no_report_and_one_sentence(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = write_report(folder, "mine", {"lineage": []}, {})
    assert said == "no report.html: a report needs matplotlib and jinja2 (pip install 'shoal[report]')"
    assert not (folder / "report.html").exists()


def drop(batch, rows, reason="too short"):
    return dropped(batch, "length", [(reason, "") if row in rows else None for row in range(len(batch))])


def test_samples_are_the_first_three_of_each_reason_whatever_the_ranges():
    batch = batch_of([f"text {n} " + "x" * 400 for n in range(12)])
    after = drop(drop(batch, {1, 4, 5, 6, 9}), {2, 11}, "no words")
    whole = Samples()
    whole.take(batch, after, 0)
    assert [one["doc"] for one in whole.found["length: too short"]] == [1, 4, 5]
    assert [one["doc"] for one in whole.found["length: no words"]] == [2, 11]
    assert whole.found["length: no words"][1]["text"] == ("text 11 " + "x" * 400)[:300]
    merged = Samples()
    for first, last in ((5, 9), (0, 5), (9, 12)):  # in any order
        part = Samples()
        part.take(batch.slice(first, last - first), after.slice(first, last - first), 0)
        merged.merge(json.loads(json.dumps(part.found)), first)
    assert merged.found == whole.found


def test_samples_are_of_what_this_stage_dropped_and_of_pages_without_text():
    batch = batch_of([None, "b"], page=[b"<html>\xff" + b"x" * 900, None])
    once = drop(batch, {0})
    samples = Samples()
    samples.take(once, once, 0)
    samples.take(once, drop(once, {1}), 0)
    samples.take(batch, once, 100)
    assert samples.found == {
        "length: too short": [{"doc": 1, "text": "b"}, {"doc": 100, "text": "<html>\ufffd" + "x" * 293}]
    }
