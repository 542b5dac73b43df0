"""Settings of deduplication, and the narrow rows that are stored with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field, PositiveInt

from shoal.data.dataset import open_dataset
from shoal.data.prepare.stages.documents import StageSettings
from shoal.errors import DataError

SETTINGS_KEY = b"shoal.signatures"  # in the metadata of a schema of narrow rows
SIGNATURE_VERSION = 1  # of the hashes: another one makes old signatures unreadable


class DedupSettings(StageSettings):
    """Deduplication of documents: equal ones, similar ones, those of other datasets, and paragraphs."""

    name: ClassVar[str] = "dedup"

    near: bool = True
    """Drop near-duplicates as well as equal documents."""
    threshold: float = Field(default=0.8, gt=0.0, le=1.0)
    """Jaccard similarity of the shingle sets from which two documents are near-duplicates."""
    shingle: Literal["auto", "words", "characters"] = "auto"
    """Shingles: 5 words, or 5 characters without white space. auto: characters for documents with at least
    30 % of their letters in scripts that do not separate words by spaces (Han, Kana, Thai, Lao, Tibetan,
    Khmer, Burmese), words for all others."""
    bands: PositiveInt = Field(default=14, le=256)
    """Bands of the signature; two documents are compared if all rows of a band are equal."""
    rows: PositiveInt = Field(default=8, le=256)
    """Rows of a band; a signature has bands x rows minimums."""
    seed: int = Field(default=0, ge=0)
    """Seed of the hash functions."""
    against: tuple[str, ...] = ()
    """Datasets made by `shoal prepare`: documents equal or similar to one of theirs are dropped."""
    paragraphs: bool = False
    """Cut out each paragraph (a line of text) that occurred before, in this document or an earlier one."""
    min_chars: PositiveInt = 100
    """Paragraphs with fewer characters are never cut out."""

    def resolved(self, say: Callable[[str], None]) -> DedupSettings:
        """Open the datasets in `against`: an error comes before the work."""
        for path in self.against:
            open_dataset(Path(path))
        return self

    @property
    def num_hashes(self) -> int:
        """Return the number of hash functions, and of minimums in a signature."""
        return self.bands * self.rows

    def signature(self) -> dict[str, Any]:
        """Return what decides the rows of a narrow file; it is stored with them, and checked."""
        names = {"near", "shingle", "bands", "rows", "seed", "paragraphs", "min_chars"}
        return {"version": SIGNATURE_VERSION, **self.model_dump(include=names)}


def candidate_probability(similarity: float, bands: int, rows: int) -> float:
    """Return 1-(1-s^r)^b: how likely two documents of Jaccard similarity s share a band.

    Source: Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", 2014, section 3.4.2.
    """
    return float(1.0 - (1.0 - similarity**rows) ** bands)


def signature_schema(settings: DedupSettings) -> pa.Schema:
    """Return the schema of narrow rows, with the settings that decide them."""
    fields = [("exact", pa.binary(16)), ("shingles", pa.int32())]  # exact: null where there is no text
    fields += [("bands", pa.list_(pa.uint64(), settings.bands))] if settings.near else []
    fields += [("paragraphs", pa.large_list(pa.uint64()))] if settings.paragraphs else []
    return pa.schema(fields, {SETTINGS_KEY: json.dumps(settings.signature(), sort_keys=True).encode()})


def check_signatures(schema: pa.Schema, settings: DedupSettings, where: str) -> None:
    """Raise DataError where signatures were made with other settings."""
    if not schema.equals(signature_schema(settings), check_metadata=True):
        found = (schema.metadata or {}).get(SETTINGS_KEY, b"none").decode(errors="replace")
        wanted = json.dumps(settings.signature(), sort_keys=True)
        raise DataError(
            f"{where} holds signatures made with the settings {found}; this run has {wanted}",
            hint="delete it, or use the same settings",
        )
