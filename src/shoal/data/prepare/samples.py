"""Examples of the documents that stages drop."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

PER_REASON, SHOWN_CHARS = 3, 300
Found = dict[str, list[dict[str, Any]]]  # "stage: reason" -> [{"doc": number, "text": its beginning}]


class Samples:
    """The first documents that each stage dropped for each reason. `found` is plain JSON."""

    def __init__(self) -> None:
        self.found: Found = {}

    def take(self, before: pa.RecordBatch, after: pa.RecordBatch, first: int) -> None:
        """Take what a stage has dropped, by the batch before and after; its first row is document `first`."""
        if after.column("stage").null_count == before.column("stage").null_count:
            return
        fresh = pc.and_(pc.is_valid(after.column("stage")), pc.is_null(before.column("stage")))
        for row in pc.indices_nonzero(fresh).to_pylist():
            texts = self.found.setdefault(f"{after['stage'][row]}: {after['reason'][row]}", [])
            if len(texts) < PER_REASON:
                text, page = before["text"][row].as_py(), before["page"][row].as_py()
                text = text or (page or b"")[: 4 * SHOWN_CHARS].decode(errors="replace")
                texts.append({"doc": first + row, "text": text[:SHOWN_CHARS]})

    def merge(self, found: Found, first: int = 0) -> None:
        """Add what was found in a range whose numbers count from document `first`."""
        for reason, texts in found.items():
            own = self.found.setdefault(reason, [])
            own += [{"doc": first + one["doc"], "text": one["text"]} for one in texts]
            own.sort(key=lambda one: one["doc"])
            del own[PER_REASON:]
