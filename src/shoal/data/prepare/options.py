"""What a preparation is asked for, checked before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError

TRAINED, CHAR, WORD, GPT2, BYTES = "bpe", "char", "word", "gpt2", "bytes"
FROM_TEXT = (TRAINED, CHAR, WORD)  # tokenizers that are made of the text
MIN_VOCAB = 257  # 256 bytes and the end-of-document token
MAX_TRAINED_VOCAB = 1 << 20


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
    shares: tuple[float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("delim", "separator"):  # a shell passes \n as two characters
            if (text := getattr(self, name)) is not None:
                object.__setattr__(self, name, text.replace("\\n", "\n").replace("\\t", "\t"))
        object.__setattr__(self, "ext", tuple(one.lower().removeprefix(".") for one in self.ext))
        object.__setattr__(self, "shares", self._effective_shares(parse_split(self.split)))
        self._check_vocab()
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
