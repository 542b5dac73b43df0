"""The two passes of a chain over the ranges, in worker processes.

Pass 1 reads, runs the stages that look at one document at a time, and commits the texts of a range and its
narrow rows. Pass 2 applies what was decided with all documents in view, and commits tokens and fates.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shoal.data.prepare.chain import chain_of
from shoal.data.prepare.decisions import DECISIONS, DUPLICATE
from shoal.data.prepare.dedup.find import CLUSTERS, CLUSTERS_NAME, DECISIONS_NAME, OLD_KEY, PARAGRAPHS_NAME
from shoal.data.prepare.dedup.find import DECISIONS as DUPLICATES
from shoal.data.prepare.dedup.minhash import Signer
from shoal.data.prepare.dedup.paragraphs import CUTS, without_paragraphs
from shoal.data.prepare.dedup.ranges import RangeFiles, file_batches
from shoal.data.prepare.dedup.settings import DedupSettings
from shoal.data.prepare.engine import Check
from shoal.data.prepare.parse import PARSED, Format, Notes
from shoal.data.prepare.read import READ, document_batches
from shoal.data.prepare.samples import Samples
from shoal.data.prepare.sources import SourceFile, WorkRange
from shoal.data.prepare.stages.decontaminate import Decontaminate
from shoal.data.prepare.stages.documents import DOCUMENTS, Stage, dropped, facts_of, with_columns
from shoal.data.prepare.work import range_paths, tokenise_stage, tokenised_schema
from shoal.data.tokenizer import load_tokenizer
from shoal.runtime.files import atomic_write, write_json

# `chars` is the length of the text when it was dropped, or now.
TEXTS = DOCUMENTS.remove(DOCUMENTS.get_field_index("page")).append(pa.field("chars", pa.int32()))
FATES = pa.schema([field for field in DECISIONS if field.name not in ("split", "position")])
_COUNTED = ("rows", "documents", "empty", "rejected", "filtered", "duplicates", "tokens", "text_bytes")
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True)
class TextFiles:
    """The files of a range after pass 1. The summary comes last, and says that it is done."""

    folder: Path
    index: int

    @property
    def summary(self) -> Path:
        return self.folder / f"{self.index:07d}.json"

    @property
    def arrow(self) -> RangeFiles:
        """Documents (TEXTS), and their narrow rows if duplicates are sought."""
        stem = f"{self.index:07d}"
        return RangeFiles(self.folder / f"{stem}.arrow", self.folder / f"{stem}.narrow.arrow")

    def texts(self, first: int, last: int, batches: Sequence[int]) -> Iterator[tuple[int, str | None]]:
        """Yield (row, text) from row `first` up to `last`; `batches` are their sizes."""
        at = 0
        with pa.memory_map(str(self.arrow.documents)) as source, pa.ipc.open_file(source) as reader:
            for number, rows in enumerate(batches):
                low, high = max(first - at, 0), min(last - at, rows)
                if low < high:
                    texts = reader.get_batch(number).column("text").slice(low, high - low)
                    yield from enumerate(texts.to_pylist(), start=at + low)
                at += rows


class TextWorker:
    """Pass 1 on one range after the other."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Take `folder`, `form` (fields of a Format) and `chain` (as `Chain.to_dict` gives it)."""
        chain = chain_of(spec["chain"])
        self._folder, self._form = Path(spec["folder"]), Format(**spec["form"], cut=None)
        self._stages = [chain.stages[name].start() for name in chain.rows]
        dedup = chain.get(DedupSettings)
        self._signer = Signer(dedup) if dedup else None

    def run(self, packed: dict[str, Any], check: Check) -> dict[str, Any]:
        """Process and commit one range; return its summary."""
        work = WorkRange.from_dict(packed["work"])
        sources = {int(number): SourceFile(**facts) for number, facts in packed["files"].items()}
        files, notes, samples = TextFiles(self._folder, work.index), Notes(), Samples()
        rows, text_bytes = list[int](), 0
        with ExitStack() as stack:
            narrow = None
            if self._signer is not None:
                file = stack.enter_context(atomic_write(files.arrow.signatures))
                narrow = stack.enter_context(pa.ipc.new_file(file, self._signer.schema))
            file = stack.enter_context(atomic_write(files.arrow.documents))
            out = stack.enter_context(pa.ipc.new_file(file, TEXTS, options=_LZ4))
            for batch in document_batches(work, sources, self._form, notes):
                done = min(notes.read_bytes(), work.num_bytes)
                batch = self._run_stages(batch, sum(rows), samples, lambda: check(done))  # noqa: B023
                out.write_batch(batch)
                if narrow is not None and self._signer is not None:
                    narrow.write_batch(self._signer.sign(batch.column("text")))
                rows.append(len(batch))
                text_bytes += _text_bytes(batch)
        summary = {"index": work.index, "role": work.role, "bytes": work.num_bytes, "batches": rows}
        summary |= {"text_bytes": text_bytes, "samples": samples.found}
        summary["lines"] = [[segment.file, notes.lines.get(n, 0)] for n, segment in enumerate(work.segments)]
        write_json(files.summary, summary)
        return summary

    def _run_stages(
        self, batch: pa.RecordBatch, first: int, samples: Samples, check: Callable[[], None]
    ) -> pa.RecordBatch:
        """Return the batch (TEXTS) after all stages."""
        chars = _lengths(batch)
        for run_stage in (*self._stages, without_empty):
            check()
            before, batch = batch, run_stage(batch)
            samples.take(before, batch, first)
            kept = batch.column("stage").is_null().to_numpy(zero_copy_only=False)
            chars = np.where(kept, _lengths(batch), chars)
        columns = [batch.column(name) for name in TEXTS.names[:-1]]
        return pa.RecordBatch.from_arrays([*columns, pa.array(chars)], schema=TEXTS)


class Duplicates:
    """What was found with all documents in view: which ones go, and which of their paragraphs."""

    def __init__(self, folder: str | None) -> None:
        """Read the files that `find_duplicates` wrote into a folder; None drops nothing."""
        place = Path(folder) if folder else None
        self.rows = SortedRows(place and place / DECISIONS_NAME, DUPLICATES)
        self.clusters = SortedRows(place and place / CLUSTERS_NAME, CLUSTERS)
        self._paragraphs = SortedRows(place and place / PARAGRAPHS_NAME, CUTS)
        self._old = json.loads(self.rows.metadata.get(OLD_KEY, b"[]"))

    def drop(self, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        """Drop duplicates of a batch (DOCUMENTS) whose first document is number `first`; cut paragraphs."""
        found = self.rows.between(first, first + len(batch))
        if len(found):
            columns = {name: batch.column(name).to_pylist() for name in ("text", "stage", "reason", "detail")}
            for fact in found.to_pylist():
                row = fact["number"] - first
                columns["text"][row], columns["detail"][row] = None, _old_twin(fact["twin"], self._old)
                columns["stage"][row], columns["reason"][row] = fact["stage"], fact["reason"]
            batch = with_columns(batch, columns)
        cuts = self._paragraphs.between(first, first + len(batch))
        if len(cuts):
            texts = batch.column("text").to_pylist()
            for fact in cuts.to_pylist():
                if (text := texts[row := fact["number"] - first]) is not None:
                    texts[row] = without_paragraphs(text, fact["cut"])
            batch = with_columns(batch, {"text": texts})
        return without_empty(batch)


class TokenWorker:
    """Pass 2 on one range after the other."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Take `texts` and `tokens` (folders), `tokenizer` (a file), `duplicates` (a folder, or None),
        `decontaminate` (settings, or None) and `common`, the n-grams that it ignores."""
        self._texts, self._tokens = Path(spec["texts"]), Path(spec["tokens"])
        tokenizer = load_tokenizer(Path(spec["tokenizer"]))
        self._schema, self._tokenise = tokenised_schema(tokenizer.vocab_size), tokenise_stage(tokenizer)
        self._duplicates = Duplicates(spec["duplicates"])
        cleaner = Decontaminate(**spec["decontaminate"]) if spec["decontaminate"] else None
        self._decontaminate = [cleaner.start(spec["common"]), without_empty] if cleaner else []

    def run(self, item: dict[str, Any], check: Check) -> dict[str, Any]:
        """Process and commit the range `index`, whose documents have the numbers from `first`."""
        index, first = item["index"], item["first"]
        data_path, summary_path = range_paths(self._tokens, index)
        counts, documents_of, samples = Counter[str](), Counter[int](), Samples()
        with (
            atomic_write(data_path) as data,
            pa.ipc.new_stream(data, self._schema) as out,
            atomic_write(fates_path(self._tokens, index)) as narrow,
            pa.ipc.new_file(narrow, FATES, options=_LZ4) as fates,
        ):
            for held in file_batches(TextFiles(self._texts, index).arrow.documents):
                check(0)
                batch = _documents(held)
                stages: list[Stage] = [partial(self._duplicates.drop, first=first), *self._decontaminate]
                for run_stage in stages:
                    before, batch = batch, run_stage(batch)
                    samples.take(before, batch, first)
                kept = batch.column("stage").is_null()
                chars = pc.if_else(kept, pc.utf8_length(batch.column("text")), held.column("chars"))
                tokens = self._tokenise(_parsed(batch))
                out.write_batch(tokens)
                fates.write_batch(_fates(batch, chars, first, self._duplicates))
                counts.update(_count(batch), tokens=len(tokens.column("tokens").flatten()))
                documents_of.update(batch.column("file").filter(kept).to_pylist())
                first += len(batch)
        summary = {**{name: counts[name] for name in _COUNTED}, "index": index, "samples": samples.found}
        summary |= {"documents_of": sorted(documents_of.items())}
        summary |= {name: item[name] for name in ("role", "bytes", "lines")}
        write_json(summary_path, summary)
        return summary


class CountWorker:
    """Counts n-grams of evaluation files in the texts of one range after the other."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Take `texts`, a folder, `duplicates`, a folder or None, and `decontaminate`, settings."""
        self._texts, self._duplicates = Path(spec["texts"]), Duplicates(spec["duplicates"])
        self._count = Decontaminate(**spec["decontaminate"]).counting()

    def run(self, item: dict[str, Any], check: Check) -> dict[str, Any]:
        """Return the counts of the range `index`, whose documents have the numbers from `first`."""
        total, first = Counter[str](), item["first"]
        for batch in file_batches(TextFiles(self._texts, item["index"]).arrow.documents):
            check(0)
            total.update(self._count(self._duplicates.drop(_documents(batch), first)))
            first += len(batch)
        return {"counts": total}


class SortedRows:
    """The rows of an Arrow file that is sorted by `number`, mapped into memory; none without a file."""

    def __init__(self, path: Path | None, schema: pa.Schema) -> None:
        there = path is not None and path.exists()
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all() if there else schema.empty_table()
        self.metadata = self._table.schema.metadata or {}
        self._numbers = self._table.column("number").to_numpy()

    def between(self, first: int, last: int) -> pa.Table:
        """Return the rows of the documents from `first` up to `last`."""
        low, high = np.searchsorted(self._numbers, [first, last])
        return self._table.slice(low, high - low)


def fates_path(folder: Path, index: int) -> Path:
    """Return the file that says what became of the documents of a range (FATES)."""
    return folder / f"{index:07d}.fates.arrow"


def without_empty(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop documents that have become empty."""
    empty = pc.fill_null(pc.equal(pc.binary_length(batch.column("text")), 0), False)
    if not pc.any(empty).as_py():
        return batch
    return dropped(batch, READ, [("empty", "") if one else None for one in empty.to_pylist()])


def _lengths(batch: pa.RecordBatch) -> np.ndarray:
    """Return the number of characters of each text, of bytes of each page."""
    texts = pc.fill_null(pc.utf8_length(batch.column("text")), 0)
    pages = pc.fill_null(pc.binary_length(batch.column("page")), 0)
    lengths: np.ndarray = pc.add(texts, pages).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int32)


def _documents(held: pa.RecordBatch) -> pa.RecordBatch:
    """Return TEXTS as DOCUMENTS."""
    pages = pa.nulls(len(held), pa.large_binary())
    columns = [pages if name == "page" else held.column(name) for name in DOCUMENTS.names]
    return pa.RecordBatch.from_arrays(columns, schema=DOCUMENTS)


def _parsed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return DOCUMENTS as PARSED; only what could not be read has a reason there."""
    whole = pa.array(np.ones(len(batch), bool))
    unread = pc.and_not(_is(batch, "stage", READ), _is(batch, "reason", "empty"))
    why = pc.coalesce(batch.column("detail"), batch.column("reason"))
    columns = {
        "starts": whole,
        "ends": whole,
        "reason": pc.if_else(unread, why, pa.scalar(None, pa.string())),
    }
    arrays = [columns[name] if name in columns else batch.column(name) for name in PARSED.names]
    return pa.RecordBatch.from_arrays(arrays, schema=PARSED)


def _is(batch: pa.RecordBatch, column: str, *values: str) -> pa.Array:
    return pc.is_in(batch.column(column), pa.array(values, pa.string()))


def _count(batch: pa.RecordBatch) -> dict[str, int]:
    """Return the counters of a batch: all rows, those that are kept, and the others by kind of reason."""
    unread, empty = _is(batch, "stage", READ), _is(batch, "reason", "empty")
    kinds = {
        "documents": batch.column("stage").is_null(),
        "empty": pc.and_(unread, empty),
        "rejected": pc.and_not(unread, empty),
        "duplicates": _is(batch, "stage", *DUPLICATE),
    }
    counts = {name: pc.sum(rows).as_py() or 0 for name, rows in kinds.items()}
    counts |= {"rows": len(batch), "filtered": len(batch) - sum(counts.values())}
    return {**counts, "text_bytes": _text_bytes(batch)}


def _text_bytes(batch: pa.RecordBatch) -> int:
    return pc.sum(pc.binary_length(batch.column("text"))).as_py() or 0


def _fates(batch: pa.RecordBatch, chars: pa.Array, first: int, duplicates: Duplicates) -> pa.RecordBatch:
    """Return the rows of the table of documents for a batch."""
    facts, found = facts_of(batch), duplicates.rows.between(first, first + len(batch))
    stay = duplicates.clusters.between(first, first + len(batch))
    sizes = dict(zip(stay["number"].to_pylist(), stay["cluster_size"].to_pylist(), strict=True))
    columns = {name: batch.column(name) for name in ("file", "offset", "stage", "reason", "detail")}
    columns |= {"number": pa.array(np.arange(first, first + len(batch))), "chars": chars}
    for name in ("url", "language"):
        values = [one.get(name) for one in facts]
        columns[name] = pa.array([value if isinstance(value, str) else None for value in values], pa.string())
    for name in ("survivor", "twin", "estimated", "exact", "cluster_size"):
        of = dict(zip(found["number"].to_pylist(), found[name].to_pylist(), strict=True))
        of |= sizes if name == "cluster_size" else {}
        values = [of.get(number) for number in range(first, first + len(batch))]
        columns[name] = pa.array(values, DUPLICATES.field(name).type)
    columns["cluster"] = columns.pop("cluster_size")
    for name in ("survivor", "twin"):  # negative: of older datasets
        own = pc.fill_null(pc.greater_equal(columns[name], 0), False)
        columns[name] = pc.if_else(own, columns[name], pa.scalar(None, pa.int64()))
    return pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in FATES], schema=FATES)


def _old_twin(twin: int | None, datasets: list[list[Any]]) -> str | None:
    """Name a document of an older dataset, whose number is negative."""
    if twin is None or twin >= 0:
        return None
    path, start, _ = next(facts for facts in datasets if facts[1] <= twin < facts[1] + facts[2])
    return f"document {twin - start:,} of {path}"
