"""Batches of documents for tests of stages."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from shoal.data.prepare.decisions import DECISIONS, TABLE, DecisionsWriter
from shoal.data.prepare.stages.documents import DOCUMENTS
from shoal.runtime.files import write_json
from tests.tiny_dataset import write_dataset


def batch_of(texts, **columns):
    """Return a batch of documents with these texts, numbered by their offsets."""
    rows = {name: [None] * len(texts) for name in DOCUMENTS.names}
    rows |= {"file": [0] * len(texts), "offset": range(len(texts)), "line": range(1, len(texts) + 1)}
    rows |= {"text": texts, **columns}
    return pa.RecordBatch.from_arrays(
        [pa.array(rows[field.name], field.type) for field in DOCUMENTS], schema=DOCUMENTS
    )


def decided(rows, first=0):
    """Return rows of the table of decisions; what a row does not name is null."""
    numbered = [
        {"number": first + n, "file": 0, "offset": 100 * (first + n)} | row for n, row in enumerate(rows)
    ]
    return pa.RecordBatch.from_pylist(numbered, schema=DECISIONS)


def dataset_of(folder, decisions, files=("web/a.jsonl",), **splits):
    """Write a dataset of texts by split, with a table of decisions."""
    ids = {name: [np.array([*text.encode()]) for text in texts] for name, texts in splits.items()}
    write_dataset(folder, ids)
    write_json(folder / "stages" / "parse.json", {"files": [{"path": path} for path in files]})
    with DecisionsWriter(folder / "stages" / TABLE) as table:
        table.add(decisions)
    return folder
