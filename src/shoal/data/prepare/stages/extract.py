"""HTML to text: the article of each page, without menus, banners and footers."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, PositiveFloat

from shoal.data.prepare.stages.documents import Reason, Stage, StageSettings, dropped, with_columns, with_meta
from shoal.data.prepare.web.child import Extractor
from shoal.data.prepare.web.pages import MAX_PAGE

_PLACE = "shoal.data.prepare.web.engines"
ENGINES = {name: f"{_PLACE}:with_{name}" for name in ("trafilatura", "resiliparse")}


class Extract(StageSettings):
    """How text is taken from web pages. Documents that are text already pass unchanged."""

    name = "extract"
    engine: Literal["trafilatura", "resiliparse"] = "trafilatura"
    """Library that extracts. trafilatura: the more precise. resiliparse: ten times as fast."""
    favour: Literal["balanced", "precision", "recall"] = "balanced"
    """What to favour in doubt. precision: less text. recall: more text."""
    deadline_s: PositiveFloat = 20.0
    """Seconds of CPU time that one page may take, and ten times as many by the clock."""
    max_page_bytes: int = Field(4 << 20, gt=0, le=MAX_PAGE)
    """Largest page in bytes, as UTF-8. Larger ones are dropped."""

    def start(self) -> Stage:
        """Return the stage, with a child process of its own. ConfigError where the library is missing."""
        extractor = Extractor(ENGINES[self.engine], self.favour, self.deadline_s)
        return lambda batch: self._extract(batch, extractor)

    def _extract(self, batch: pa.RecordBatch, extractor: Extractor) -> pa.RecordBatch:
        """Put text in the place of pages; title, date and language go to `meta`."""
        pages, texts = batch.column("page"), batch.column("text").to_pylist()
        if pages.null_count == len(batch):
            return batch
        facts: list[dict[str, Any] | None] = [None] * len(batch)
        reasons: list[Reason] = [None] * len(batch)
        for row, page in enumerate(pages.to_pylist()):
            if page is None:
                continue
            texts[row], facts[row], reasons[row] = self._one(page, extractor)
        batch = with_columns(batch, {"text": texts, "page": [None] * len(batch)})
        return dropped(with_meta(batch, facts), self.name, reasons)

    def _one(self, page: bytes, extractor: Extractor) -> tuple[str | None, dict[str, str], Reason]:
        """Return (text, facts, why not) of a page."""
        if len(page) > self.max_page_bytes:
            return None, {}, ("too large", f"{len(page):,} bytes, more than {self.max_page_bytes:,}")
        found = extractor.run(page)
        if "reason" in found:
            return None, {}, (found["reason"], found["detail"])
        text = found.pop("text").encode(errors="replace").decode()
        return (text, found, None) if text.strip() else (None, found, ("no text", "nothing but boilerplate"))
