"""Batches of documents for tests of stages."""

from __future__ import annotations

import pyarrow as pa

from shoal.data.prepare.stages.documents import DOCUMENTS


def batch_of(texts, **columns):
    """Return a batch of documents with these texts, numbered by their offsets."""
    rows = {name: [None] * len(texts) for name in DOCUMENTS.names}
    rows |= {"file": [0] * len(texts), "offset": range(len(texts)), "line": range(1, len(texts) + 1)}
    rows |= {"text": texts, **columns}
    return pa.RecordBatch.from_arrays(
        [pa.array(rows[field.name], field.type) for field in DOCUMENTS], schema=DOCUMENTS
    )
