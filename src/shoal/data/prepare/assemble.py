"""Put the tokens of all ranges together: token files for each split, refused lines, and what was counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shoal.data.dataset import SPLITS
from shoal.data.indexed import IndexedReader, IndexedWriter, token_dtype
from shoal.data.prepare.sources import SourceFile
from shoal.data.prepare.splits import SplitPlan, shuffled_place
from shoal.data.prepare.work import range_paths
from shoal.runtime.files import atomic_write

REJECTS_DIR = "rejects"
REJECTS_NAME = "rejects.jsonl"
_OTHER_ROLES = {"validation": 1, "test": 2}


def assemble(
    folder: Path, target: Path, summaries: list[dict[str, Any]], plan: SplitPlan, vocab_size: int
) -> dict[str, dict[str, Any]]:
    """Write token files of each split that gets tokens from the ranges in `folder`; return their facts."""
    wanted = {n for n, count in enumerate(plan.counts) if count} | {
        _OTHER_ROLES[s["role"]] for s in summaries if s["role"] != "main"
    }
    with ExitStack() as stack:
        writers = {
            n: stack.enter_context(IndexedWriter(target / SPLITS[n], token_dtype(vocab_size)))
            for n in sorted(wanted)
        }
        sink = _TokenSink(writers, plan) if plan.by == "tokens" else _DocumentSink(writers, plan)
        for summary in summaries:
            fixed = _OTHER_ROLES.get(summary["role"])
            for batch in read_batches(range_paths(folder, summary["index"])[0]):
                tokens, lengths, starts, ends = _kept_rows(batch)
                if fixed is None:
                    sink.add(tokens, lengths, starts, ends)
                else:
                    _write_rows(writers[fixed], tokens, lengths, ends)
        facts = _finished({SPLITS[n]: writer for n, writer in writers.items()})
    return _shuffle(target, facts, plan.seed, vocab_size) if plan.shuffled else facts


def _finished(writers: dict[str, IndexedWriter]) -> dict[str, dict[str, Any]]:
    facts = {name: writer.finish() for name, writer in writers.items()}
    return {name: {**fact, "max_id": writers[name].max_id} for name, fact in facts.items()}


def _shuffle(
    folder: Path, facts: dict[str, dict[str, Any]], seed: int, vocab_size: int
) -> dict[str, dict[str, Any]]:
    """Write the token files again with the documents of each split in an order drawn by the seed."""
    hidden = folder / "shuffled"
    hidden.mkdir()
    for name, fact in facts.items():
        reader, number = IndexedReader(folder / name), fact["documents"]
        order = np.argsort(shuffled_place(np.arange(number, dtype=np.int64), number, seed, name))
        with IndexedWriter(hidden / name, token_dtype(vocab_size)) as writer:
            for document in order.tolist():
                writer.append(reader.document(document))
                writer.end_document()
            facts[name] |= _finished({name: writer})[name]
    for path in hidden.iterdir():
        path.replace(folder / path.name)
    hidden.rmdir()
    return facts


class _DocumentSink:
    """Sends each document of the main text to the split that the plan gives it."""

    def __init__(self, writers: dict[int, IndexedWriter], plan: SplitPlan) -> None:
        self._writers, self._plan = writers, plan
        self._started = 0
        self._last = np.zeros(0, dtype=np.int8)  # split of the document that is still open

    def add(self, tokens: np.ndarray, lengths: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Write rows; a row that does not start a document goes where that document went."""
        fresh = self._plan.of_documents(self._started, int(starts.sum()))
        known = np.concatenate([self._last, fresh])
        of_row = known[np.cumsum(starts) - 1 + len(self._last)]
        self._started += len(fresh)
        self._last = known[-1:]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        changes = np.flatnonzero(np.diff(of_row)) + 1
        for first, last in zip([0, *changes], [*changes, len(of_row)], strict=True):
            if first < last:
                part = tokens[offsets[first] : offsets[last]]
                _write_rows(self._writers[int(of_row[first])], part, lengths[first:last], ends[first:last])


class _TokenSink:
    """Cuts the stream of all tokens of the main text at the places that the plan gives."""

    def __init__(self, writers: dict[int, IndexedWriter], plan: SplitPlan) -> None:
        self._writers, self._stretches = writers, plan.of_tokens()
        self._at = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Write rows; a stretch's end also ends a document."""
        offset = 0
        for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
            while length:
                split, border = self._stretches[0]
                take = min(length, border - self._at)
                self._writers[split].append(tokens[offset : offset + take])
                self._at, offset, length = self._at + take, offset + take, length - take
                if self._at == border:
                    self._stretches.pop(0)
                if self._at == border or (end and not length):
                    self._writers[split].end_document()


def _write_rows(writer: IndexedWriter, tokens: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> None:
    """Append rows to one split: whole documents at once, pieces one by one."""
    if writer.between_documents and ends.all():
        writer.append_documents(tokens, lengths)
        return
    offset = 0
    for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
        writer.append(tokens[offset : offset + length])
        offset += length
        if end:
            writer.end_document()


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a finished range, memory-mapped."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        yield from reader


def _kept_rows(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens end to end, lengths, starts, ends) of the rows that hold tokens."""
    column = batch.column("tokens")
    lengths = np.diff(column.offsets.to_numpy())
    kept = lengths > 0
    starts = batch.column("starts").to_numpy(zero_copy_only=False)
    ends = batch.column("ends").to_numpy(zero_copy_only=False)
    return column.flatten().to_numpy(), lengths[kept], starts[kept], ends[kept]


def write_rejects(
    folder: Path, target: Path, summaries: list[dict[str, Any]], sources: list[SourceFile]
) -> None:
    """List every refused document in `rejects/rejects.jsonl`: file, line (from 1), offset and reason."""
    lines_before: dict[int, int] = {}
    with atomic_write(target / REJECTS_DIR / REJECTS_NAME) as out:
        for summary in summaries:
            if summary["rejected"]:
                for batch in read_batches(range_paths(folder, summary["index"])[0]):
                    out.writelines(_reject_lines(batch, sources, lines_before))
            for file, count in summary["lines"]:
                lines_before[file] = lines_before.get(file, 0) + count


def _reject_lines(
    batch: pa.RecordBatch, sources: list[SourceFile], lines_before: dict[int, int]
) -> Iterator[bytes]:
    """Yield one JSON line for each refused row."""
    rows = batch.select(["file", "offset", "line", "reason"]).to_pylist()
    for row in rows:
        if row["reason"] is not None:
            line = row["line"] + lines_before.get(row["file"], 0) if row["line"] else None
            entry = {
                "file": sources[row["file"]].path,
                "line": line,
                "offset": row["offset"],
                "reason": row["reason"],
            }
            yield json.dumps(entry).encode() + b"\n"  # ASCII: a file's name need not be UTF-8
