"""Label each document with its language, and keep only some languages if asked."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
from pydantic import Field, PositiveInt

from shoal.data.prepare.stages.documents import (
    Reason,
    Stage,
    StageSettings,
    dropped,
    facts_of,
    require,
    with_meta,
)
from shoal.data.prepare.stages.source_code import Kind, is_source_code
from shoal.errors import ConfigError

UNDETERMINED = "und"  # as in ISO 639-2
_MIN_LETTER_BYTES = 24  # in UTF-8: 24 letters of English, 12 of Russian, 8 Chinese characters
_LETTERS = re.compile(r"[^\W\d_]+")


class Language(StageSettings):
    """Language identification with py3langid, a naive Bayes classifier of byte n-grams (Lui and Baldwin,
    langid.py, 2012).

    It is offline and has no random part. The label is the fact `language`, an ISO 639 code, with
    `language_score` from 0 to 1; what the page said of itself becomes `page_language`. Texts with too few
    letters are labelled `und`, texts without linguistic content `zxx`. Source code is not labelled: its fact
    is `kind`.
    """

    name = "language"
    keep: tuple[str, ...] = ()
    """Codes of the languages to keep, such as ["en", "de"]; documents in other languages are dropped. Empty
    keeps all."""
    min_score: float = Field(default=0.0, ge=0.0, le=1.0)
    """With keep: minimum score of a document."""
    sample_chars: PositiveInt = 500
    """Characters that are looked at from the beginning of a document, and as many from its middle."""
    kind: Kind = "auto"
    """What the documents are: text, code, or auto, which recognises source code by the shape of its lines."""

    def start(self) -> Stage:
        """Return the stage. A code in keep that is not known is a ConfigError."""
        langid = require("py3langid.langid")
        identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        known = {*identifier.labels, UNDETERMINED}
        if unknown := [code for code in self.keep if code not in known]:
            raise ConfigError(
                f"language.keep: {', '.join(unknown)} is not a known language code",
                hint=f"known: {', '.join(sorted(known))}",
            )

        def stage(batch: pa.RecordBatch) -> pa.RecordBatch:
            texts, facts = batch.column("text").to_pylist(), facts_of(batch)
            found = [
                self._label(text, old, identifier) if text is not None else {}
                for text, old in zip(texts, facts, strict=True)
            ]
            return dropped(with_meta(batch, found), self.name, [self._reason(label) for label in found])

        return stage

    def _label(self, text: str, old: dict[str, Any], identifier: Any) -> dict[str, Any]:
        if self.kind == "code" or (self.kind == "auto" and is_source_code(text)):
            return {"kind": "code"}
        size = self.sample_chars
        middle = len(text) // 2
        sample = text if len(text) <= 2 * size else f"{text[:size]}\n{text[middle : middle + size]}"
        code, score = UNDETERMINED, 0.0
        if len("".join(_LETTERS.findall(sample)).encode()) >= _MIN_LETTER_BYTES:
            code, score = identifier.classify(sample)
        said = {"page_language": old["language"]} if "language" in old else {}
        return {**said, "language": code, "language_score": round(score, 2)}

    def _reason(self, label: dict[str, Any]) -> Reason:
        if not self.keep or "language" not in label:
            return None
        code, score = label["language"], label["language_score"]
        if code not in self.keep:
            return "language", f"{code}, {score:.2f}"
        low = score < self.min_score
        return ("language score", f"{code}, {score:.2f}, less than {self.min_score:.2f}") if low else None
