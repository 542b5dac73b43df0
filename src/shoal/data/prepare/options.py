"""What a preparation is asked for, checked before anything is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

TRAINED, CHAR, WORD, GPT2, BYTES = "bpe", "char", "word", "gpt2", "bytes"
FROM_TEXT = (TRAINED, CHAR, WORD)  # tokenizers that are made of the text
MIN_VOCAB = 257  # 256 bytes and the end-of-document token
MAX_TRAINED_VOCAB = 1 << 20
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)b?", re.IGNORECASE)
_LEAST_MEMORY = 100_000_000


@dataclass(frozen=True)
class PrepareOptions:
    """What `shoal prepare` can be told; `workers`, `range_bytes` and `runner` never change the result."""

    inputs: tuple[str, ...]
    output: Path
    tokenizer: str = TRAINED
    vocab_size: int | None = None
    split: str = "949,50,1"
    seed: int = 1234
    text_key: str = "text"
    delim: str | None = None
    separator: str | None = None
    limit: int | None = None
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    max_rejected_share: float = 0.05
    workers: int | None = None
    ext: tuple[str, ...] = ()
    range_bytes: int | None = None
    runner: str = "local"
    web: bool = False
    stages: Path | None = None
    urls: tuple[str, ...] = ()
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings of stages
    shuffle: bool = False
    max_memory: str = "1GB"
    shares: tuple[float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("delim", "separator"):  # a shell passes \n as two characters
            if (text := getattr(self, name)) is not None:
                object.__setattr__(self, name, text.replace("\\n", "\n").replace("\\t", "\t"))
        object.__setattr__(self, "ext", tuple(one.lower().removeprefix(".") for one in self.ext))
        object.__setattr__(self, "shares", self._effective_shares(parse_split(self.split)))
        self._check_vocab()
        self._check_chain()
        if self.delim is not None and len(self.delim) != 1:
            raise ConfigError(f"--delim {self.delim!r} is not one character", hint="use , or ; or \\t")
        if self.separator == "":
            raise ConfigError(
                "--separator is empty", hint="leave it out: then each .txt file is one document"
            )
        for name, value in (("--limit", self.limit), ("--workers", self.workers)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value} is below 1", hint="leave it out for no limit")
        if not 0 <= self.max_rejected_share <= 1:
            raise ConfigError(
                f"--max-rejected-share {self.max_rejected_share} is not a share", hint="use 0 to 1"
            )

    @property
    def has_chain(self) -> bool:
        """Tell whether documents go through a chain of stages."""
        return self.web or self.stages is not None or bool(self.urls)

    @property
    def memory_bytes(self) -> int:
        """Return --max-memory in bytes."""
        found = _MEMORY.fullmatch(self.max_memory.strip())
        size = int(float(found[1]) * 1000 ** " kmgt".index((found[2] or " ").lower())) if found else 0
        if size < _LEAST_MEMORY:
            raise ConfigError(
                f"--max-memory {self.max_memory!r} is no size of at least 100MB", hint="use for example 2GB"
            )
        return size

    def _check_chain(self) -> None:
        """Refuse what does not go together with the presence, or absence, of a chain."""
        self.memory_bytes  # noqa: B018  (raises)
        if not self.inputs and not self.urls:
            raise ConfigError(
                "there is no input", hint="name files or folders, or a list of URLs with --urls"
            )
        if self.web and self.stages is not None:
            raise ConfigError(
                "--web is a chain of stages, and --stages names another", hint="give one of them"
            )
        if self.changes and not self.has_chain:
            options = {"language": "--languages", "quality": "--kind", "dedup": "--shingle"}
            raise ConfigError(
                f"{options[next(iter(self.changes))]} is for a chain of stages",
                hint="add --web or --stages FILE",
            )
        if self.urls and self.limit is not None:
            raise ConfigError("--limit counts documents of files, not pages", hint="shorten the list of URLs")

    def _check_vocab(self) -> None:
        """Refuse a vocabulary size that nothing can use."""
        if self.vocab_size is None:
            return
        if self.tokenizer not in (TRAINED, WORD):
            raise ConfigError(
                f"--vocab-size {self.vocab_size} with --tokenizer {self.tokenizer}: that vocabulary is fixed",
                hint=f"leave it out, or use --tokenizer {TRAINED} or {WORD}",
            )
        least = MIN_VOCAB if self.tokenizer == TRAINED else 3
        if not least <= self.vocab_size <= MAX_TRAINED_VOCAB:
            raise ConfigError(
                f"--vocab-size {self.vocab_size} is not between {least} and {MAX_TRAINED_VOCAB:,}",
                hint="leave it out: then a BPE has an id for each 3 kB of text, of 512 to 32,768",
            )

    def _effective_shares(self, shares: tuple[float, float, float]) -> tuple[float, float, float]:
        """Take no validation or test part from the main text where separate files are given for it."""
        train, validation, test = shares
        kept = (train, 0.0 if self.validation else validation, 0.0 if self.test else test)
        if not kept[0]:
            raise ConfigError(
                f"--split {self.split} leaves no training data", hint="use for example 949,50,1"
            )
        return tuple(value / sum(kept) for value in kept)  # type: ignore[return-value]


def parse_split(text: str) -> tuple[float, float, float]:
    """Read "949,50,1": weights of train, validation and test; missing ones are 0."""
    words = text.replace("/", ",").split(",")
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 3 or min(values) < 0 or not math.isfinite(sum(values)) or sum(values) <= 0:
        raise ConfigError(
            f"--split {text!r} is not one to three weights", hint="use for example 949,50,1 or 0.9,0.1"
        )
    train, validation, test = [*values, 0.0, 0.0][:3]
    return train, validation, test
