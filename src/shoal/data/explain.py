"""`shoal explain DATASET DOC`: which stage dropped or kept a document, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.data.commands import document_of, printable
from shoal.data.dataset import PAGES_DIR, SPLITS, Dataset, open_dataset
from shoal.data.indexed import IndexedReader
from shoal.data.tokenizer import load_tokenizer
from shoal.errors import EXIT_DONE, ConfigError, DataError, InputError, counted
from shoal.runtime.files import check_targets, reading, write_json

Facts = dict[str, Any]
_LONGEST_LINE = 1 << 16
_SHOWN_CHARS = 300
_MOST_TOKENS = 4 * _SHOWN_CHARS  # a character takes up to four bytes, and so up to four tokens


def explain(path: Path, doc: str, json_file: Path | None = None) -> int:
    """Print what became of a document, and write it to `json_file` if given."""
    check_targets(json_file)
    dataset = open_dataset(path)
    with reading(path):
        has_table = (path / "stages" / "documents.parquet").is_file()
    facts = _of_table(dataset, doc) if has_table else _kept_alone(dataset, doc)
    for line in _lines(facts):
        print(printable(line))
    if json_file is not None:
        write_json(json_file, facts)
    return EXIT_DONE


def _of_table(dataset: Dataset, doc: str) -> Facts:
    """Return what the table of documents says."""
    try:
        from shoal.data.prepare.decisions import Decisions
    except ModuleNotFoundError as error:
        raise ConfigError(f"shoal explain needs {error.name}", hint="pip install 'shoal[data]'") from error
    table = Decisions(dataset.path)
    try:
        found = table.find(doc)
    except InputError:
        if (facts := _not_fetched(dataset.path, doc)) is None:
            raise
        if facts["reason"] != "ok":
            return facts
        found = table.find(facts["final_url"])  # it was redirected
    facts = dict(found)
    for other in ("twin", "survivor"):
        if found[other] is not None:
            row = table.row(found[other])
            facts[other] = {name: row[name] for name in ("number", "path", "offset", "url", "stage")}
    if found["split"] is not None and found["position"] is not None:
        facts |= _kept(dataset, SPLITS[found["split"]], found["position"])
    return facts


def _not_fetched(path: Path, doc: str) -> Facts | None:
    """Return what the manifest of fetched pages says about a URL without a page."""
    manifest = path / PAGES_DIR / "manifest.jsonl"
    if not manifest.is_file():
        return None
    key = json.dumps(doc).encode()
    with reading(manifest), manifest.open("rb") as file:
        for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
            if key in line and (facts := json.loads(line))["url"] == doc:
                why = {name: facts[name] for name in ("reason", "detail", "status", "final_url")}
                return {"number": None, "from": doc, "stage": "fetch", **why}
    return None


def _kept_alone(dataset: Dataset, doc: str) -> Facts:
    """Return what is known of a document of train where no stage has dropped any."""
    if not (doc.isascii() and doc.isdigit()):
        raise InputError(
            f"{dataset.path} was prepared without stages and has no table of documents: {doc} is not known",
            hint="give the number of a document of train, as to `shoal dataset show DATASET --doc N`",
        )
    shown = document_of(dataset, "train", int(doc), 1)
    return {"number": int(doc), "from": shown["from"], "stage": None} | _kept(dataset, "train", int(doc))


def _kept(dataset: Dataset, split: str, position: int) -> Facts:
    """Return where a kept document lies in its token file, and how its text begins."""
    reader = IndexedReader(dataset.path / split)
    if not 0 <= position < reader.num_documents:
        held = counted(reader.num_documents, "document")
        raise DataError(f"the table of documents names document {position} of {split}, which has {held}")
    first, end = reader.span(position)
    facts: Facts = {"split": split, "position": position, "first_token": first, "tokens": end - first}
    facts["first_byte"] = first * reader.dtype.itemsize
    if dataset.tokenizer_path is not None:
        ids = reader.tokens[first:end][:_MOST_TOKENS].tolist()
        facts["text"] = load_tokenizer(dataset.tokenizer_path).decode(ids)[:_SHOWN_CHARS]
    return facts


def _lines(facts: Facts) -> Iterator[str]:
    """Yield what is printed."""
    yield f"document {facts['number']:,}: {_place(facts)}" if facts["number"] is not None else _place(facts)
    detail = f" ({facts['detail']})" if facts.get("detail") else ""
    yield f"dropped by {facts['stage']}: {facts['reason']}{detail}" if facts["stage"] else f"kept{detail}"
    if facts.get("cluster"):
        yield f"in a cluster of {counted(facts['cluster'], 'near-duplicate')}"
    if twin := facts.get("twin"):
        measured = [f"{facts[kind]:.3f} {kind}" for kind in ("estimated", "exact") if facts[kind] is not None]
        similarity = f"similarity {', '.join(measured)}, to " if measured else ""
        fate = f", dropped by {twin['stage']}" if twin["stage"] else ""
        yield f"twin: {similarity}document {twin['number']:,}: {_place(twin)}{fate}"
    if (stays := facts.get("survivor")) and stays != twin:
        yield f"kept of the cluster: document {stays['number']:,}: {_place(stays)}"
    if facts.get("chars"):
        yield f"text: {facts['chars']:,} characters" + (f", {facts['language']}" if facts["language"] else "")
    if "first_token" in facts:
        yield (
            f"{facts['split']} document {facts['position']:,}: {facts['tokens']:,} tokens from token "
            f"{facts['first_token']:,} (byte {facts['first_byte']:,}) of {facts['split']}.bin"
        )
        yield facts.get("text", "")


def _place(facts: Facts) -> str:
    """Say where a document came from."""
    if "from" in facts:
        return str(facts["from"])
    return f"{facts['path']}:{facts['offset']}" + (f" ({facts['url']})" if facts["url"] else "")
