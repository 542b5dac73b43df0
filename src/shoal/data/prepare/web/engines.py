"""From a page's HTML to the text of its article, by one of two libraries, and the facts in its head.

Only a process of `web.child` runs this: these libraries may hang or crash on a page.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Engine = Callable[[str], dict[str, str]]
_HEAD = 1 << 16  # characters in which the facts are looked for
_MAX_TITLE = 300
_DATES = ("article:published_time", "datepublished", "dc.date.issued", "dcterms.created", "date", "dc.date")
_BODY = re.compile(r"<body[\s>]", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_LINKED_DATE = re.compile(r'"datePublished"\s*:\s*"(\d{4}-\d\d-\d\d)')  # of schema.org in JSON-LD
_LANGUAGE = re.compile(r"[a-z]{2,3}(?![a-z])")


def with_trafilatura(favour: str) -> Engine:
    """Return trafilatura, with its default settings but for `favour`."""
    from trafilatura import extract

    def engine(html: str) -> dict[str, str]:
        precision, recall = favour == "precision", favour == "recall"
        text = extract(html, favor_precision=precision, favor_recall=recall, deduplicate=False)
        return {"text": text or "", **facts_of(html)}

    return engine


def with_resiliparse(favour: str) -> Engine:
    """Return resiliparse; "recall" takes the text of the whole page."""
    from resiliparse.extract.html2text import extract_plain_text

    def engine(html: str) -> dict[str, str]:
        main = favour != "recall"
        text = extract_plain_text(html, main_content=main, comments=favour != "precision")
        return {"text": text, **facts_of(html)}

    return engine


def facts_of(html: str) -> dict[str, str]:
    """Return title, date of publication (YYYY-MM-DD) and language (ISO 639) as the page states them."""
    from lxml import etree

    body = _BODY.search(html, 0, _HEAD)
    head = html[: body.start() if body else _HEAD].encode(errors="replace") + b"<body>"
    root = etree.fromstring(head, etree.HTMLParser(encoding="utf-8"))
    named: dict[str, str] = {}
    for tag in root.iter("meta"):
        name = next(filter(None, map(tag.get, ("property", "name", "itemprop"))), "")
        named.setdefault(name.lower(), tag.get("content") or "")
    linked = _LINKED_DATE.search(html)
    dates = filter(None, (_DATE.match(named.get(name, "")) for name in _DATES))
    languages = (_LANGUAGE.match(one.lower()) for one in (root.get("lang") or "", named.get("og:locale", "")))
    language = next(filter(None, languages), None)
    title = " ".join((named.get("og:title") or root.findtext(".//title") or "").split())[:_MAX_TITLE]
    date = next((found[0] for found in dates), linked[1] if linked else "")
    facts = {"title": title, "date": date, "language": language[0] if language else ""}
    return {name: fact for name, fact in facts.items() if fact}
