"""`shoal dataset ls | verify | show`: what lies in a dataset, is it whole, where a document came from."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from shoal.data.dataset import (
    EXAMPLES_FORMAT,
    FORMAT,
    MANIFEST,
    SPLITS,
    Dataset,
    check_digest,
    open_dataset,
    verify_dataset,
)
from shoal.data.examples import ExampleSet, open_examples
from shoal.data.identity import tokenizer_digest
from shoal.data.indexed import IndexedReader
from shoal.data.prepare.splits import SplitPlan, shuffled_place
from shoal.data.tokenizer import load_tokenizer, read_tokenizer
from shoal.errors import EXIT_DONE, EXIT_FAILED, DataError, InputError, ShoalError, counted
from shoal.runtime.files import read_json, reading, write_json

Facts = dict[str, Any]
_SHOWN_TOKENS = 2000  # of a document
_SAMPLE_TOKENS = 60  # of the one that is shown where none is asked for
_AT_ONCE = 1 << 20  # documents


def list_datasets(path: Path, json_file: Path | None = None) -> int:
    """Print one line a dataset; one that cannot be opened is there with the reason."""
    rows = []
    table = Table(box=None)
    for heading in ("dataset", "holds", "documents", "vocabulary", "tokenizer", "size", "sizes"):
        table.add_column(heading, overflow="fold")
    for folder in _find(path):
        try:
            row = _facts(_open(folder)) | {"problem": ""}
        except ShoalError as error:
            row = {"path": str(folder), "problem": error.message}
        rows.append(row)
        holds = ", ".join(f"{row[unit]:,} {unit}" for unit in ("tokens", "examples") if unit in row)
        documents, size = row.get("documents"), row.get("size_bytes")
        table.add_row(
            folder.name,
            holds,
            "" if documents is None else f"{documents:,}",
            str(row.get("vocab_size", "")),
            f"{row['tokenizer']} {row['tokenizer_digest'][:12]}" if row.get("tokenizer") else "",
            "" if size is None else f"{size / 1e6:,.1f} MB",
            row["problem"] or "fit",
        )
    Console(markup=False).print(table)  # a name from a stranger is text
    if json_file is not None:
        write_json(json_file, {"datasets": rows})
    return EXIT_DONE


def verify_datasets(path: Path, json_file: Path | None = None) -> int:
    """Read every file again, print a line a dataset, and return 1 where one is damaged."""
    problems = {}
    for folder in _find(path):
        try:
            _read_all(folder)
        except ShoalError as error:
            problems[folder] = error.message
        print(f"{folder}: {problems.get(folder, 'good')}")
    if json_file is not None:
        found = [{"path": str(one), "problem": problems.get(one, "")} for one in _find(path)]
        write_json(json_file, {"datasets": found})
    return EXIT_FAILED if problems else EXIT_DONE


def show_dataset(path: Path, doc: int | None, split: str, json_file: Path | None = None) -> int:
    """Print a dataset's facts and lineage, and a document with its source, or the beginning of the first."""
    opened = _open(path)
    facts = _facts(opened)
    if doc is not None:
        facts["document"] = document_of(opened, split, doc, _SHOWN_TOKENS)
    elif facts.get("tokenizer") and facts["splits"].get(split, {}).get("documents"):
        facts["document"] = document_of(opened, split, 0, _SAMPLE_TOKENS)
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if name == "splits":
            for each, held in value.items():
                table.add_row(f"  {each}", ", ".join(f"{count:,} {unit}" for unit, count in held.items()))
        elif isinstance(value, dict):
            table.add_row(name, "" if name == "document" else ", ".join(f"{k} {v}" for k, v in value.items()))
        elif value is not None:
            table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    console = Console(markup=False, highlight=False)
    console.print(table)
    if shown := facts.get("document"):
        number, tokens, source = shown["number"], shown["tokens"], printable(shown["from"])
        console.print(f"{split} document {number}, {tokens:,} tokens, from {source}:")
        print(printable(shown["text"]))
    if json_file is not None:
        write_json(json_file, facts)
    return EXIT_DONE


def _find(path: Path) -> list[Path]:
    """Return a dataset, or those in a folder."""
    with reading(path):
        if not path.is_dir():
            raise InputError(f"{path} is not a folder", hint="give a dataset, or a folder of datasets")
        folders = [path] if (path / MANIFEST).exists() else sorted(filter(_may_be_one, path.iterdir()))
    if not folders:
        raise InputError(
            f"{path} holds no dataset", hint=f"make one: shoal prepare TEXT --output {path / 'mine'}"
        )
    return folders


def _may_be_one(folder: Path) -> bool:
    """Return whether a folder has a manifest, or cannot be looked into: opening it says why."""
    try:
        return (folder / MANIFEST).exists()
    except OSError:
        return True


def _open(path: Path) -> Dataset | ExampleSet:
    """Open a dataset of tokens or of labelled examples."""
    with reading(path):
        is_there = (path / MANIFEST).is_file()
    manifest = read_json(path / MANIFEST, "dataset manifest") if is_there else None
    if isinstance(manifest, dict) and manifest.get("format") == EXAMPLES_FORMAT:
        return open_examples(path)
    return open_dataset(path)


def _read_all(path: Path) -> None:
    opened = _open(path)
    if isinstance(opened, Dataset):
        verify_dataset(path)
        return
    for file, digest in opened.digests.items():
        check_digest(file, digest)


def _facts(opened: Dataset | ExampleSet) -> Facts:
    """Return what a dataset holds and how it was made, as plain values."""
    manifest = opened.manifest
    units = ("tokens", "documents") if manifest["format"] == FORMAT else ("examples",)
    splits = {
        name: {unit: manifest["splits"][name][unit] for unit in units}
        for name in SPLITS
        if name in opened.splits
    }
    facts: Facts = {"path": str(opened.path), "fingerprint": opened.fingerprint, "splits": splits}
    facts |= {unit: sum(held[unit] for held in splits.values()) for unit in units}
    facts["dtype"] = manifest["dtype"]
    if isinstance(opened, Dataset):
        facts |= {"vocab_size": opened.vocab_size, "end_of_document": opened.eod_id, "tokenizer": None}
        if opened.tokenizer_path is not None:
            facts["tokenizer"] = manifest["tokenizer"].get("kind", opened.tokenizer_path.name)
            facts["tokenizer_digest"] = tokenizer_digest(read_tokenizer(opened.tokenizer_path))
    else:
        facts |= {"shape": str(list(opened.shape)), "classes": opened.num_classes}
    facts["size_bytes"] = sum(file.stat().st_size for file in opened.digests)
    facts |= {name: manifest[name] for name in ("made_by", "inputs", "counters") if name in manifest}
    return facts


def printable(text: str) -> str:
    """Replace the control characters of a stranger's text but newline and tab: a terminal would obey them."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def document_of(opened: Dataset | ExampleSet, split: str, number: int, most: int) -> Facts:
    """Return the source of a document, and its text up to `most` tokens."""
    if not isinstance(opened, Dataset) or opened.tokenizer_path is None:
        raise InputError(f"{opened.path} holds no text", hint="leave --doc out")
    found = opened.split(split)
    if found is None or not 0 <= number < found.num_documents:
        held = found.num_documents if found else 0
        raise InputError(
            f"--doc {number}: split {split} of {opened.path} has {counted(held, 'document')}",
            hint="counted from 0",
        )
    tokens = IndexedReader(opened.path / split).document(number)
    text = load_tokenizer(opened.tokenizer_path).decode(tokens[:most].tolist())
    more = len(tokens) - most
    text += f" ... and {more:,} tokens more" if more > 0 else ""
    return {"split": split, "number": number, "tokens": len(tokens), "from": _origin(opened, split, number),
            "text": text}  # fmt: skip


def _origin(dataset: Dataset, split: str, number: int) -> str:
    """Say which document of which file a document is, by the record of how the text was read and split."""
    record = dataset.path / "stages" / "parse.json"
    try:
        files = read_json(record, "record of a stage")["files"] if record.is_file() else []
        own = [file for file in files if file["role"] == split]  # given as files of this split
        number = _before_shuffle(dataset, split, number)
        place = number if own else _place(dataset.manifest["split"], split, number)
        own = own or [file for file in files if file["role"] == "main"]
        for file in own if place is not None else ():
            if place < file["documents"]:
                return f"{file['path']}, document {place} of {file['documents']:,} kept"
            place -= file["documents"]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{record} has a missing or invalid entry: {error}") from error
    return "an unknown file (the record of preparation is missing)"


def _before_shuffle(dataset: Dataset, split: str, number: int) -> int:
    """Return the place that a document of a split had before the split was shuffled."""
    plan, documents = dataset.manifest["split"], dataset.splits[split].num_documents
    if not plan.get("shuffled"):
        return number
    places = shuffled_place(np.arange(documents, dtype=np.int64), documents, plan["seed"], split)
    return int(np.flatnonzero(places == number)[0])


def _place(plan: Facts, split: str, number: int) -> int | None:
    """Return the place of a split's document among all of the main text; None if it was split by tokens."""
    if plan["by"] != "documents":
        return None
    whole = SplitPlan("documents", tuple(plan["counts"]), plan["seed"])
    for first in range(0, sum(whole.counts), _AT_ONCE):
        count = min(_AT_ONCE, sum(whole.counts) - first)
        here = np.flatnonzero(whole.of_documents(first, count) == SPLITS.index(split))
        if number < len(here):
            return first + int(here[number])
        number -= len(here)
    return None
