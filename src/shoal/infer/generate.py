"""Continue token sequences with a KV cache: unequal prompts in one batch, each row as if it were alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.infer.sampling import Sampling, choose, row_generator
from shoal.models.cache import KVCache
from shoal.models.decoder import Decoder
from shoal.models.shape import ModelShape
from shoal.runtime.log import log

DEFAULT_MAX_TOKENS = 256
_PREFILL = 512  # tokens of a prompt that are read at a time


@dataclass(frozen=True)
class Row:
    """One sequence to continue: `prompt` and `sample` number it and decide what it draws."""

    tokens: Sequence[int]
    max_tokens: int
    prompt: int = 0
    sample: int = 0


def tokens_that_fit(shape: ModelShape, num_prompt: int, max_tokens: int | None) -> int:
    """Return how many tokens to generate; None asks for 256, or fewer where the positions end before.

    An InputError refuses what goes beyond learned positions; rotary ones have no end, only a warning.
    """
    room = shape.max_seq_len - num_prompt
    if max_tokens is None:
        max_tokens = min(DEFAULT_MAX_TOKENS, room) if room > 0 else DEFAULT_MAX_TOKENS
    if shape.style == "gpt2" and max_tokens > room:
        raise InputError(
            f"a prompt of {num_prompt} tokens and {max_tokens} new ones do not fit the model's "
            f"{shape.max_seq_len} positions",
            hint=f"use --max-tokens {room} or fewer" if room > 0 else "shorten the prompt",
        )
    if max_tokens > room:
        _warn_of_length(shape.max_seq_len)
    return max_tokens


@functools.cache  # once is enough
def _warn_of_length(max_seq_len: int) -> None:
    log.warning(f"warning: beyond the {max_seq_len} positions that the model was made for, text gets worse")


class Engine:
    """Continues token sequences that come and go: the live ones are computed together, a token at a time."""

    def __init__(self, model: Decoder, rows: int, capacity: int) -> None:
        """Make room for so many sequences at a time, of at most `capacity` tokens."""
        assert model.head is not None, "only whole models generate"
        self._model, self._head = model, model.head
        weight = model.head.weight
        self._device = weight.device
        self._cache = KVCache(model.shape, rows, capacity, weight.dtype, weight.device, model.head_parts)
        self.live = 0

    @torch.inference_mode()
    def admit(self, tokens: Sequence[int]) -> Tensor:
        """Take a sequence in as the last live one; return the logits of what follows it, [padded vocabulary].

        A long one is read in parts, so that what attention needs does not grow with its square.
        """
        self._cache.lengths[self.live] = 0
        tokens_bt = torch.tensor([tokens], device=self._device)
        for part_bt in tokens_bt.split(_PREFILL, dim=1):
            x_btd = self._model.hidden(part_bt, cache=self._cache.part(self.live, 1))
        self.live += 1
        logits_v: Tensor = self._head(x_btd[:, -1])[0]
        return logits_v

    @torch.inference_mode()
    def step(self, chosen: Sequence[int]) -> Tensor:
        """Give each live sequence its next token; return the logits of what follows, [live, vocabulary]."""
        tokens_b1 = torch.tensor(chosen, device=self._device)[:, None]
        x_btd = self._model.hidden(tokens_b1, cache=self._cache.part(0, self.live))
        logits_bv: Tensor = self._head(x_btd[:, -1])
        return logits_bv

    def drop(self, place: int) -> None:
        """Forget a live sequence; the last one takes its place."""
        self.live -= 1
        if place < self.live:
            self._cache.move(self.live, place)


def generate(
    model: Decoder, rows: Sequence[Row], sampling: Sampling, stop_id: int | None
) -> Iterator[tuple[int, int]]:
    """Yield (row number, token id), a token for each unfinished row in turn.

    A row ends with its `max_tokens` or before `stop_id`, which is not yielded.
    """
    engine = Engine(model, len(rows), max(len(row.tokens) + row.max_tokens for row in rows))
    generators = [row_generator(sampling.seed, row.prompt, row.sample) for row in rows]
    left = [row.max_tokens for row in rows]
    live = list(range(len(rows)))
    logits_bv = torch.stack([engine.admit(row.tokens) for row in rows])
    while live:
        chosen = choose(logits_bv, sampling, [generators[row] for row in live])
        done = []
        for place, (row, token) in enumerate(zip(live, chosen, strict=True)):
            if token != stop_id:
                yield row, token
                left[row] -= 1
            if token == stop_id or left[row] == 0:
                done.append(place)
        for place in reversed(done):
            engine.drop(place)
            live[place], chosen[place] = live[-1], chosen[-1]
            del live[-1], chosen[-1]
        if live:
            logits_bv = engine.step(chosen)
