"""From logits to the next token. A row draws from its own generator, whatever else is in the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; an InputError names a value out of range."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(
                f"temperature = {self.temperature} is negative or not finite",
                hint="use 0 for the likeliest token, 1 for the model's own distribution",
            )
        if self.top_k < 0:
            raise InputError(f"top-k = {self.top_k} is negative", hint="use 1 or more, or 0 for no limit")
        if not 0 < self.top_p <= 1:
            raise InputError(
                f"top-p = {self.top_p} is not above 0 and at most 1", hint="use 1 for no limit, 0.9 is common"
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def row_generator(seed: int, prompt: int, sample: int) -> torch.Generator:
    """Make the generator of one sample of one prompt."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def choose(
    logits_bv: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> list[int]:
    """Return one token id for each row; a column of -inf (padded vocabulary) is never chosen."""
    alike: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        alike.setdefault(replace(sampling, seed=0), []).append(row)
    if len(alike) == 1:
        return _choose(logits_bv, samplings[0], generators)
    chosen = [0] * len(samplings)
    for sampling, rows in alike.items():
        found = _choose(logits_bv[rows], sampling, [generators[row] for row in rows])
        for row, token in zip(rows, found, strict=True):
            chosen[row] = token
    return chosen


def _choose(logits_bv: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    if sampling.greedy:
        return logits_bv.argmax(dim=-1).tolist()
    logits_bv = logits_bv.double()
    below_bv = logits_bv - logits_bv.amax(dim=-1, keepdim=True)  # first: no temperature makes it overflow
    logits_bv = filter_logits(below_bv / sampling.temperature, sampling.top_k, sampling.top_p)
    cumulative_bv = logits_bv.softmax(dim=-1).cumsum(dim=-1)
    total_b1 = cumulative_bv[:, -1:].contiguous()
    draws = torch.cat(
        [torch.rand(1, 1, dtype=torch.float64, generator=generator) for generator in generators]
    )
    chosen_b1 = torch.searchsorted(cumulative_bv, draws.to(total_b1.device) * total_b1, right=True)
    last_b1 = torch.searchsorted(
        cumulative_bv, total_b1
    )  # rounding must not lead beyond the last possible id
    return chosen_b1.minimum(last_b1).squeeze(1).tolist()


def filter_logits(logits_bv: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set to -inf all but the k largest, ties included, then all beyond the nucleus of mass p.

    The nucleus is the smallest set of likeliest tokens whose probability exceeds p (Holtzman et al. 2020).
    """
    if 0 < top_k < logits_bv.shape[-1]:
        smallest_b1 = logits_bv.topk(top_k, dim=-1).values[:, -1:]
        logits_bv = logits_bv.masked_fill(logits_bv < smallest_b1, float("-inf"))
    if 0 < top_p < 1:
        sorted_bv, order_bv = logits_bv.sort(dim=-1, descending=True, stable=True)
        probability_bv = sorted_bv.softmax(dim=-1)
        before_bv = probability_bv.cumsum(dim=-1) - probability_bv
        outside_bv = torch.zeros_like(before_bv, dtype=torch.bool).scatter(-1, order_bv, before_bv > top_p)
        logits_bv = logits_bv.masked_fill(outside_bv, float("-inf"))
    return logits_bv
