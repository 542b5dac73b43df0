"""Documents on their way through the stages of a preparation: rows of Arrow batches.

A stage is a function from a batch to a batch of the same rows. It changes texts, adds facts to `meta`, or
drops documents: then `text` is null, and `stage`, `reason` and `detail` say why.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from shoal.config.sections import Section
from shoal.errors import ConfigError

DOCUMENTS = pa.schema(
    [
        ("file", pa.int32()),
        ("offset", pa.int64()),  # with `file` the document's identity
        ("line", pa.int64()),
        ("text", pa.large_string()),  # null: dropped, or a page that is not extracted yet
        ("page", pa.large_binary()),  # HTML that waits to be extracted; null otherwise
        ("meta", pa.string()),  # a JSON object: url, title, date, language, ...; null: {}
        ("stage", pa.string()),  # the stage that dropped it; null: kept
        ("reason", pa.string()),  # why, in one of a few words that are counted: "too short"
        ("detail", pa.string()),  # why in this case: "97 tokens, fewer than 128"
    ]
)
Stage = Callable[[pa.RecordBatch], pa.RecordBatch]
Reason = tuple[str, str] | None  # (reason, detail) of a document to drop; None: it is kept


class StageSettings(Section):
    """Base of the settings of a stage; a field's docstring is its documentation."""

    name: ClassVar[str]  # of its table in a TOML of stages, and in counters

    def resolved(self, say: Callable[[str], None]) -> StageSettings:
        """Return settings that every process can follow; `say` what had to be replaced."""
        return self

    def start(self) -> Stage:
        """Return the stage, in the process that will run it."""
        raise NotImplementedError


def with_columns(batch: pa.RecordBatch, columns: Mapping[str, Sequence[Any] | pa.Array]) -> pa.RecordBatch:
    """Return the batch with some columns replaced."""
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else batch.column(field.name)
        for field in DOCUMENTS
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=DOCUMENTS)


def dropped(batch: pa.RecordBatch, stage: str, reasons: Sequence[Reason]) -> pa.RecordBatch:
    """Drop the documents that have a reason. One that was dropped before keeps its first reason."""
    rows = batch.select(["text", "page", "stage", "reason", "detail"]).to_pydict()
    for row, reason in enumerate(reasons):
        if reason is not None and rows["stage"][row] is None:
            rows["text"][row] = rows["page"][row] = None
            rows["stage"][row], (rows["reason"][row], rows["detail"][row]) = stage, reason
    return with_columns(batch, rows) if any(reasons) else batch


def with_meta(batch: pa.RecordBatch, facts: Sequence[Mapping[str, Any] | None]) -> pa.RecordBatch:
    """Add facts to the documents' `meta`; None and empty ones change nothing."""
    if not any(facts):
        return batch
    before = batch.column("meta").to_pylist()
    after = [
        json.dumps({**json.loads(old or "{}"), **new}, ensure_ascii=False) if new else old
        for old, new in zip(before, facts, strict=True)
    ]
    return with_columns(batch, {"meta": after})


def facts_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the `meta` of each document."""
    return [json.loads(meta) if meta else {} for meta in batch.column("meta").to_pylist()]


def require(module: str) -> Any:
    """Import a module of the extra `web`; ConfigError with the pip command where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"this needs the package {module}", hint="pip install 'shoal[web]'") from error
