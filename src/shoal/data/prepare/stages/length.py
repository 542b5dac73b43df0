"""Drop documents that are too short, by tokens, or too long, by characters."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice

import pyarrow as pa
from pydantic import NonNegativeInt

from shoal.data.boundaries import AFTER_WORD
from shoal.data.prepare.options import GPT2
from shoal.data.prepare.stages.documents import Reason, Stage, StageSettings, dropped
from shoal.data.prepare.vocabulary import fixed_tokenizer
from shoal.data.tokenizer import parse_tokenizer
from shoal.errors import InputError, counted

ESTIMATE = "estimate"
_Counter = Callable[[Sequence[str]], list[int]]  # tokens of each text, or the minimum where they are as many


class Length(StageSettings):
    """Length of a document: a minimum of tokens, and a maximum of characters."""

    name = "length"
    min_tokens: NonNegativeInt = 128
    """Minimum number of tokens, without an end-of-document token."""
    max_chars: NonNegativeInt = 0
    """Maximum number of characters; 0 means no maximum."""
    tokenizer: str = GPT2
    """Tokenizer that counts: gpt2, bytes, a file or folder as for --tokenizer, or estimate: a token for each
    4 characters of ASCII, and 2 for each 3 other bytes of UTF-8."""

    def resolved(self, say: Callable[[str], None]) -> Length:
        """Return settings that every process can follow: `estimate` if GPT-2's vocabulary is not available.

        The main process calls this once, and stores and hands on what it returns.
        """
        try:
            if self.tokenizer == GPT2:
                fixed_tokenizer(GPT2)
        except InputError as error:
            say(f"{error.message}; the length of documents is estimated")
            return self.model_copy(update={"tokenizer": ESTIMATE})
        return self

    def start(self) -> Stage:
        """Return the stage. A tokenizer that cannot be read is an InputError."""
        estimates = self.tokenizer == ESTIMATE
        count = _estimated if estimates else _counted(self.tokenizer, self.min_tokens)
        unit = "estimated token" if estimates else "token"

        def reason(text: str, tokens: int) -> Reason:
            if tokens < self.min_tokens:
                return "too short", f"{counted(tokens, unit)}, fewer than {self.min_tokens:,}"
            if 0 < self.max_chars < len(text):
                return "too long", f"{counted(len(text), 'character')}, more than {self.max_chars:,}"
            return None

        def stage(batch: pa.RecordBatch) -> pa.RecordBatch:
            texts = batch.column("text").to_pylist()
            numbers = iter(count([text for text in texts if text is not None]))
            return dropped(
                batch, self.name, [None if text is None else reason(text, next(numbers)) for text in texts]
            )

        return stage


def _estimated(texts: Sequence[str]) -> list[int]:
    """Estimate tokens of GPT-2, which has about 4.4 bytes a token in English and 1.5 in other scripts."""
    sizes = [(len(text.encode()), len(text.encode("ascii", "ignore"))) for text in texts]
    return [ascii_bytes // 4 + 2 * (total - ascii_bytes) // 3 for total, ascii_bytes in sizes]


def _counted(choice: str, minimum: int) -> _Counter:
    """Return the counter of a tokenizer. Only texts that may have fewer tokens than the minimum are encoded.

    A text has at least one token more than places where it may be cut without a change of ids. In a
    byte-level BPE it has at least as many as its bytes over those of the longest token (128 in GPT-2).
    """
    content = fixed_tokenizer(choice)
    tokenizer = parse_tokenizer(content, choice)
    byte_level = tokenizer.cut is AFTER_WORD
    longest = max(map(len, json.loads(content)["model"]["vocab"])) if byte_level else 0
    cuts = tokenizer.cut.pattern if tokenizer.cut else None

    def surely_enough(text: str) -> bool:
        if longest and len(text) >= longest * minimum:
            return True
        places = cuts.finditer(text.encode()) if cuts else iter(())
        return sum(1 for _ in islice(places, minimum)) >= minimum

    def count(texts: Sequence[str]) -> list[int]:
        known = [surely_enough(text) for text in texts]
        ids = iter(
            tokenizer.encode_batch([text for text, sure in zip(texts, known, strict=True) if not sure])
        )
        return [minimum if sure else min(len(next(ids)), minimum) for sure in known]

    return count
