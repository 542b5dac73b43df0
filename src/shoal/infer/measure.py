"""What an evaluation is asked for, and the scoring of its spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from shoal.errors import InputError
from shoal.infer.load import TextModel
from shoal.infer.score import Score, Span

Found = dict[str, Any]


@dataclass(frozen=True)
class Measure:
    """What to measure on, in windows of `seq_len` tokens (0: all positions), `stride` apart (0: seq_len)."""

    text: Path | None = None
    wikitext: Path | None = None
    lambada: Path | None = None
    data: Path | None = None
    tasks: tuple[str, ...] = ()  # of lm-evaluation-harness
    task_folder: Path | None = None  # with more of them
    limit: int = 0  # examples of a task; 0: all
    allow_tokenizer_mismatch: bool = False
    split: str = "validation"
    seq_len: int = 0
    stride: int = 0
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name, least in (("seq_len", 0), ("stride", 0), ("limit", 0), ("batch_size", 1)):
            if (value := getattr(self, name)) < least:
                option = name.replace("_", "-")
                raise InputError(
                    f"--{option} {value} is not allowed", hint=f"use {least + (not least)} or more"
                )


def score_all(loaded: TextModel, spans: Sequence[Span], batch_size: int) -> list[Score]:
    """Score spans, the longest first and in batches of alike lengths, with a progress bar on a terminal."""
    order = sorted(range(len(spans)), key=lambda n: -len(spans[n].tokens))
    console, size = Console(stderr=True), batch_size * loaded.num_replicas
    bar: Callable[..., Iterable[int]] = track
    steps = bar(
        range(0, len(spans), size),
        description="scoring",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    scores: dict[int, Score] = {}
    for n in steps:
        numbers = order[n : n + size]
        found = loaded.score([spans[number] for number in numbers], batch_size)
        scores |= zip(numbers, found, strict=True)
    return [scores[number] for number in range(len(spans))]
