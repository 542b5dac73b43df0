"""Which document, or which stretch of tokens, belongs to train, validation and test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.data.dataset import SPLITS
from shoal.data.permutation import permute
from shoal.errors import DataError, counted

Shares = tuple[float, float, float]
MIN_TOKENS = 2  # one to look at and one to predict


@dataclass(frozen=True)
class SplitPlan:
    """How the main text is divided. `counts` are documents, or tokens where `by` is "tokens"."""

    by: str
    counts: tuple[int, int, int]
    seed: int
    shuffled: bool = False  # the documents of each split, afterwards

    def of_documents(self, first: int, number: int) -> np.ndarray:
        """Return the split (0 train, 1 validation, 2 test) of documents first..first + number - 1."""
        place = permute(
            np.arange(first, first + number, dtype=np.int64), sum(self.counts), self.seed, "split"
        )
        _, validation, test = self.counts
        return np.where(place < test, 2, np.where(place < test + validation, 1, 0)).astype(np.int8)

    def of_tokens(self) -> list[tuple[int, int]]:
        """Return (split, end) stretches of the token stream; validation and test lie at a seeded place."""
        train, validation, test = self.counts
        start = int(permute(np.zeros(1, dtype=np.int64), train + 1, self.seed, "split")[0])
        ends = [(0, start), (1, start + validation), (2, start + validation + test), (0, sum(self.counts))]
        return [(split, end) for n, (split, end) in enumerate(ends) if end > (ends[n - 1][1] if n else 0)]


def plan_split(
    documents: int, tokens: int, shares: Shares, seed: int, text: str, *, shuffled: bool = False
) -> SplitPlan:
    """Divide by documents where each wanted split gets one, else by tokens, else raise DataError."""
    counts = allocate(documents, shares)
    if all(count or not share for count, share in zip(counts, shares, strict=True)):
        return SplitPlan("documents", counts, seed, shuffled)
    counts = allocate(tokens, shares)
    if all(count >= MIN_TOKENS or not share for count, share in zip(counts, shares, strict=True)):
        return SplitPlan("tokens", counts, seed, shuffled)
    smallest = min(share for share in shares if share)
    needed = int(np.ceil(MIN_TOKENS / smallest))
    given = ", ".join(f"{name} {count:,}" for name, count in zip(SPLITS, counts, strict=True))
    raise DataError(
        f"split {text} of a text with {counted(documents, 'document')} and {counted(tokens, 'token')} gives "
        f"{given} tokens; each needs at least {MIN_TOKENS}, which takes {needed:,} tokens in all",
        hint="add text, or give the smallest split a larger weight (--split 8,1,1) or none (--split 9,1)",
    )


def allocate(total: int, shares: Shares) -> tuple[int, int, int]:
    """Round `total * shares` to whole numbers that sum to `total`, largest remainders first."""
    exact = [total * share for share in shares]
    counts = [int(value) for value in exact]
    order = sorted(range(3), key=lambda n: (counts[n] - exact[n], n))
    for n in order[: total - sum(counts)]:
        counts[n] += 1
    return counts[0], counts[1], counts[2]


def shuffled_place(places: np.ndarray, number: int, seed: int, split: str) -> np.ndarray:
    """Return where the documents at some places of a split are after the shuffle; it has `number` in all."""
    return permute(places, number, seed, f"shuffle {split}")
