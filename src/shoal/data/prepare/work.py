"""Work on one range: parse it, run the stages, commit one file of tokens. Worker processes run this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shoal.data.indexed import token_dtype
from shoal.data.prepare.parse import PARSED, Format, Notes, parse_range
from shoal.data.prepare.sources import SourceFile, WorkRange
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.runtime.files import atomic_write, write_json

Stage = Callable[[pa.RecordBatch], pa.RecordBatch]


def pack_range(work: WorkRange, sources: list[SourceFile]) -> dict[str, Any]:
    """Return a range with the facts of the files it touches, as plain values."""
    files = {segment.file: asdict(sources[segment.file]) for segment in work.segments}
    return {"work": asdict(work), "files": {str(number): facts for number, facts in files.items()}}


class RangeWorker:
    """Does ranges one after the other; the tokenizer is loaded once."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Take `folder`, for finished ranges, `tokenizer`, a file, and `form` (fields of a Format)."""
        self._folder = Path(spec["folder"])
        self._tokenizer = load_tokenizer(Path(spec["tokenizer"]))
        self._form = Format(**spec["form"], cut=self._tokenizer.cut)
        self._stages: list[Stage] = [tokenise_stage(self._tokenizer)]

    def run(self, packed: dict[str, Any], check: Callable[[int], None]) -> dict[str, Any]:
        """Process and commit one range; return its summary. `check` hears the bytes read, raises to stop."""
        work = WorkRange.from_dict(packed["work"])
        sources = {int(number): SourceFile(**facts) for number, facts in packed["files"].items()}
        data_path, summary_path = range_paths(self._folder, work.index)
        schema = tokenised_schema(self._tokenizer.vocab_size)
        notes, documents_of = Notes(), Counter[int]()
        counts = {"rows": 0, "documents": 0, "empty": 0, "rejected": 0, "tokens": 0, "text_bytes": 0}
        with atomic_write(data_path) as file, pa.ipc.new_stream(file, schema) as out:
            for batch in parse_range(work, sources, self._form, notes):
                check(min(notes.read_bytes(), work.num_bytes))
                _count_text(counts, documents_of, batch)
                for stage in self._stages:
                    batch = stage(batch)
                counts["tokens"] += len(batch.column("tokens").flatten())
                out.write_batch(batch)
        summary = {"index": work.index, "role": work.role, "bytes": work.num_bytes, **counts}
        summary["lines"] = [[segment.file, notes.lines.get(n, 0)] for n, segment in enumerate(work.segments)]
        summary["documents_of"] = sorted(documents_of.items())
        write_json(summary_path, summary)
        check(0)
        return summary


def range_paths(folder: Path, index: int) -> tuple[Path, Path]:
    """Return the file of a range's tokens and that of its summary, whose presence says that it is done."""
    return folder / f"{index:07d}.arrow", folder / f"{index:07d}.json"


def tokenised_schema(vocab_size: int) -> pa.Schema:
    """Return the schema of a finished range: PARSED with tokens in the place of text."""
    kind = pa.from_numpy_dtype(token_dtype(vocab_size))
    fields = [pa.field("tokens", pa.large_list(kind)) if f.name == "text" else f for f in PARSED]
    return pa.schema(fields)


def tokenise_stage(tokenizer: Tokenizer) -> Stage:
    """Return the stage that replaces text by ids; an end-of-document id follows each whole text."""
    schema = tokenised_schema(tokenizer.vocab_size)
    dtype = token_dtype(tokenizer.vocab_size)
    eod = np.array([tokenizer.eod_id], dtype=np.uint32)

    def tokenise(batch: pa.RecordBatch) -> pa.RecordBatch:
        texts, ends = batch.column("text").to_pylist(), batch.column("ends").to_pylist()
        ids = tokenizer.encode_batch([text or "" for text in texts])
        parts = _with_ends(texts, ends, ids, eod)
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([sum(map(len, part)) for part in parts], out=offsets[1:])
        pieces = [piece for part in parts for piece in part]
        flat = np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)
        values = pa.array(flat.astype(dtype))
        tokens = pa.LargeListArray.from_arrays(pa.array(offsets), values)
        columns = [tokens if name == "text" else batch.column(name) for name in PARSED.names]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    return tokenise


def _with_ends(
    texts: list[str | None], ends: Iterable[bool], ids: list[np.ndarray], eod: np.ndarray
) -> list[list[np.ndarray]]:
    """Give each text its ids and, at its end, the end-of-document id; refused and empty texts get nothing."""
    return [
        ([] if not text else [found, eod] if end else [found])
        for text, end, found in zip(texts, ends, ids, strict=True)
    ]


def _count_text(counts: dict[str, int], documents_of: Counter[int], batch: pa.RecordBatch) -> None:
    """Add a parsed batch to a range's counters, and its documents to those of each file."""
    sizes = pc.fill_null(pc.binary_length(batch.column("text")), 0)
    rejected = len(batch) - batch.column("reason").null_count
    counts["rows"] += len(batch)
    counts["rejected"] += rejected
    counts["text_bytes"] += pc.sum(sizes).as_py() or 0
    filled = pc.greater(sizes, 0)
    counts["empty"] += len(batch) - rejected - (pc.sum(filled).as_py() or 0)
    begun = batch.column("file").filter(pc.and_(filled, batch.column("starts"))).to_pylist()
    counts["documents"] += len(begun)
    documents_of.update(begun)
