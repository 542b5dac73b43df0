"""Continue token sequences with a KV cache: unequal prompts in one batch, each row as if it were alone.

A sequence longer than the window (the model's positions) slides: when one more token comes to a full window,
its last half is kept and read again at positions from 0. To keep all but one token, as nanoGPT does, costs
a pass over the whole window for each token; by halves each token is read once more on average.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.infer.sampling import Sampling, choose, row_generator
from shoal.models.cache import KVCache
from shoal.models.decoder import Decoder
from shoal.models.shape import ModelShape
from shoal.runtime.log import log

Key = TypeVar("Key", bound=Hashable)

DEFAULT_MAX_TOKENS = 256
_PREFILL = 512  # tokens of a prompt that are read at a time


@dataclass(frozen=True)
class GeneratedRow:
    """One sequence to continue: `prompt` and `sample` number it and decide what it draws."""

    tokens: Sequence[int]
    max_tokens: int
    prompt: int = 0
    sample: int = 0


def tokens_that_fit(
    shape: ModelShape, num_prompt: int, max_tokens: int | None, *, strict: bool = False
) -> int:
    """Return how many tokens to generate, by default 256; a text beyond the model's positions will slide.

    `strict`: an InputError rejects such a text, and the default is 256, or fewer where the positions end.
    """
    room = shape.max_seq_len - num_prompt
    if max_tokens is None:
        max_tokens = min(DEFAULT_MAX_TOKENS, room) if strict and room > 0 else DEFAULT_MAX_TOKENS
    if strict and max_tokens > room:
        raise InputError(
            f"a prompt of {num_prompt} tokens and {max_tokens} new ones do not fit the model's "
            f"{shape.max_seq_len} positions",
            hint=f"use --max-tokens {room} or fewer" if room > 0 else "shorten the prompt",
        )
    if max_tokens > room:
        _announce_sliding(shape.max_seq_len)
    return max_tokens


@functools.cache  # once is enough
def _announce_sliding(window: int) -> None:
    log.warning(
        f"note: prompt and new tokens exceed the model's {window} positions; the text continues on its last "
        f"{_kept(window)} to {window} tokens (--max-length-error rejects it instead)"
    )


def _kept(window: int) -> int:
    """Return how many tokens a window holds after it has slid, the new one included."""
    return max(1, window // 2)


class Engine:
    """Computes sequences that come and go: one that is read, and live ones, a token each at a time."""

    def __init__(self, model: Decoder, rows: int, capacity: int) -> None:
        """Make room for so many live sequences at a time, of at most `capacity` tokens."""
        assert model.head is not None, "only whole models generate"
        self._model, self._head = model, model.head
        self._device = model.head.weight.device
        kind = (model.head.weight.dtype, self._device, model.head_parts)
        self._cache = KVCache(model.shape, rows, capacity, *kind)
        self.rows, self.capacity = rows, capacity
        self.live = 0

    def is_full(self, place: int) -> bool:
        """Say whether a live sequence has no room for its next token."""
        return self._cache.lengths[place] == self.capacity

    @torch.inference_mode()
    def replace(self, place: int, tokens: Sequence[int]) -> None:
        """Make a live sequence one of these tokens alone."""
        self._cache.lengths[place] = 0
        for part in _parts(tokens):
            self._logits(torch.tensor([part]), place, 1)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read on in the sequence that is to come; return the logits of what follows, [padded vocabulary]."""
        return self._logits(torch.tensor([tokens]), self.live, 1)[0]

    def admit(self) -> None:
        """Make the sequence that was read the last live one."""
        self.live += 1

    def forget(self) -> None:
        """Begin anew with what is read."""
        self._cache.lengths[self.live] = 0

    @torch.inference_mode()
    def step(self, chosen: Sequence[int]) -> Tensor:
        """Give each live sequence its next token; return the logits of what follows, [live, vocabulary]."""
        return self._logits(torch.tensor(chosen)[:, None], 0, self.live)

    def drop(self, place: int) -> None:
        """Forget a live sequence; the last one takes its place, and what is read the last one's."""
        being_read, self.live = self.live, self.live - 1
        if place < self.live:
            self._cache.move(self.live, place)
        if being_read < self.rows:
            self._cache.move(being_read, self.live)
            self._cache.lengths[being_read] = 0
        else:
            self.forget()

    def _logits(self, tokens_bt: Tensor, first: int, count: int) -> Tensor:
        x_btd = self._model.hidden(tokens_bt.to(self._device), cache=self._cache.part(first, count))
        logits_bv: Tensor = self._head(x_btd[:, -1])
        return logits_bv


def _parts(tokens: Sequence[int]) -> list[Sequence[int]]:
    return [tokens[first : first + _PREFILL] for first in range(0, len(tokens), _PREFILL)]


@dataclass
class _Live(Generic[Key]):
    key: Key
    sampling: Sampling
    generator: torch.Generator
    left: int
    tokens: list[int]  # the prompt and what followed


class DecodingBatch(Generic[Key]):
    """Rows that are continued together, each as if it were alone; they may come and go at any token."""

    def __init__(self, engine: Engine, stop_id: int | None) -> None:
        self._engine, self._stop_id = engine, stop_id
        self._live: list[_Live[Key]] = []
        self._logits_bv: list[Tensor] = []  # of the rows that have come since the last token, one each

    def __len__(self) -> int:
        return len(self._live)

    def add(self, key: Key, row: GeneratedRow, sampling: Sampling) -> Iterator[int]:
        """Read a prompt, at most 512 tokens at each turn of this iterator, then take the row in as `key`.

        Yields how many were read: in parts, what attention needs does not grow with the square of the prompt,
        and other rows can go on in between. Left before its end it takes nothing in. Of a prompt beyond the
        window the last tokens are read.
        """
        self._engine.forget()
        for part in _parts(row.tokens[-self._engine.capacity :]):
            logits_v = self._engine.read(part)
            yield len(part)
        self._engine.admit()
        generator = row_generator(sampling.seed, row.prompt, row.sample)
        self._live.append(_Live(key, sampling, generator, row.max_tokens, list(row.tokens)))
        self._logits_bv.append(logits_v[None])

    def advance(self) -> list[tuple[Key, int | None]]:
        """Choose a token for each row, in the order they came but for those that took a dropped one's place.

        A None follows a row's last token, or stands for its `stop_id`; the row has left then.
        """
        live = self._live
        chosen = choose(
            torch.cat(self._logits_bv), [one.sampling for one in live], [one.generator for one in live]
        )
        told: list[tuple[Key, int | None]] = []
        over = []
        for place, (one, token) in enumerate(zip(live, chosen, strict=True)):
            one.left -= 1
            if token != self._stop_id:
                told.append((one.key, token))
            if token == self._stop_id or one.left == 0:
                told.append((one.key, None))
                over.append(place)
        for place in reversed(over):
            self._leave(place, chosen)
        self._logits_bv = [self._step(chosen)] if live else []
        return told

    def _step(self, chosen: list[int]) -> Tensor:
        for place, (one, token) in enumerate(zip(self._live, chosen, strict=True)):
            one.tokens.append(token)
            if self._engine.is_full(place):
                self._engine.replace(place, one.tokens[-_kept(self._engine.capacity) : -1])
        return self._engine.step(chosen)

    def drop(self, key: Key) -> None:
        """Let a row go that is not over."""
        place = next(place for place, one in enumerate(self._live) if one.key == key)
        logits = list(torch.cat(self._logits_bv).split(1))
        self._leave(place, logits)
        self._logits_bv = logits

    def _leave(self, place: int, beside: list[Any]) -> None:
        """Remove a row here and in a list with something for each; the last one takes its place."""
        self._engine.drop(place)
        for held in (self._live, beside):
            held[place] = held[-1]
            del held[-1]


def generate(
    model: Decoder, rows: Sequence[GeneratedRow], sampling: Sampling, stop_id: int | None
) -> Iterator[tuple[int, int]]:
    """Yield (row number, token id), a token for each unfinished row in turn.

    A row ends with its `max_tokens` or before `stop_id`, which is not yielded.
    """
    longest = max(len(row.tokens) + row.max_tokens for row in rows)
    capacity = min(longest, model.shape.max_seq_len)
    batch: DecodingBatch[int] = DecodingBatch(Engine(model, len(rows), capacity), stop_id)
    for number, row in enumerate(rows):
        for _ in batch.add(number, row, sampling):
            pass
    while batch:
        for number, token in batch.advance():
            if token is not None:
                yield number, token
