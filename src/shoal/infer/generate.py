"""Continue token sequences with a KV cache: unequal prompts in one batch, each row as if it were alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shoal.errors import InputError
from shoal.infer.sampling import Sampling, choose, row_generator
from shoal.models.cache import KVCache
from shoal.models.decoder import Decoder
from shoal.models.shape import ModelShape
from shoal.runtime.log import log

DEFAULT_MAX_TOKENS = 256


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


@torch.inference_mode()
def generate(
    model: Decoder, rows: Sequence[Row], sampling: Sampling, stop_id: int | None
) -> Iterator[tuple[int, int]]:
    """Yield (row number, token id), a token for each unfinished row in turn.

    A row ends with its `max_tokens` or before `stop_id`, which is not yielded.
    """
    assert model.head is not None, "only whole models generate"
    device = model.head.weight.device
    longest = max(len(row.tokens) for row in rows)
    starts = [longest - len(row.tokens) for row in rows]
    capacity = longest + max(row.max_tokens for row in rows)
    starts_b = torch.tensor(starts, device=device)
    cache = KVCache(model.shape, starts_b, capacity, model.head.weight.dtype, model.head_parts)
    padded = [[0] * start + list(row.tokens) for start, row in zip(starts, rows, strict=True)]
    generators = [row_generator(sampling.seed, row.prompt, row.sample) for row in rows]
    left = [row.max_tokens for row in rows]
    live = list(range(len(rows)))
    tokens_bt = torch.tensor(padded, device=device)
    while live:
        logits_bv = model.head(model.hidden(tokens_bt, cache=cache)[:, -1])
        chosen = choose(logits_bv, sampling, [generators[row] for row in live])
        keep = []
        for place, (row, token) in enumerate(zip(live, chosen, strict=True)):
            if token != stop_id:
                yield row, token
                left[row] -= 1
            if token != stop_id and left[row] > 0:
                keep.append(place)
        if keep and len(keep) < len(live):
            cache.keep_rows(torch.tensor(keep, device=device))
        live = [live[place] for place in keep]
        tokens_bt = torch.tensor([[chosen[place]] for place in keep], device=device)
