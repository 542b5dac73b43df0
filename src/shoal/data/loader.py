"""Which samples a step trains on: a pure function of (datasets, seed, step). Ranks own ranges, never files.

Samples are labelled examples, or windows of tokens: each dataset's token stream is cut into windows of
seq_len + 1 tokens, a window's last token being the next one's first. Without weights, all samples of all
datasets form one epoch, each trained on exactly once in an order drawn anew for each epoch. With weights,
every block of `_MIX_BLOCK` samples holds each dataset's exact share, and each dataset runs through its own
epochs. A batch may straddle two epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import TokenSplit
from shoal.data.permutation import permute
from shoal.errors import ConfigError, DataError
from shoal.runtime.log import log

_MIX_BLOCK = 10_000  # a weight is honoured to one part in this
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Samples(Protocol[T_co]):
    """One split of several datasets, in one index space; T is what samples are when read."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """Samples of each dataset."""

    @property
    def targets(self) -> int:
        """What a sample has the model predict: tokens, or its one label."""

    def read(self, index: NDArray[np.int64]) -> T_co:
        """Read samples by index."""

    def refuse_empty(self, *, each: bool) -> None:
        """Raise a DataError where no dataset has a sample, or with `each` where one has none."""


@dataclass(frozen=True)
class Batch(Generic[T]):
    """One rank's share of a step: its samples as they were read, and their places in the run."""

    step: int
    data: T
    samples: NDArray[np.int64]
    global_targets: int  # of the step, over all ranks of this world


class Windows:
    """The windows of one split of several datasets, in one index space."""

    def __init__(self, splits: Sequence[TokenSplit], seq_len: int) -> None:
        self.seq_len = self.targets = seq_len
        self.splits = splits
        self.counts: NDArray[np.int64] = np.array(
            [max(0, (split.num_tokens - 1) // seq_len) for split in splits], dtype=np.int64
        )
        self.starts = starts(self.counts)

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    @property
    def tail_tokens(self) -> int:
        """Tokens at the ends of the splits that fill no window."""
        return int(
            sum(s.num_tokens - c * self.seq_len for s, c in zip(self.splits, self.counts, strict=True))
        )

    def read(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read windows by index into int64 [len(index), seq_len + 1]."""
        out = np.empty((len(index), self.seq_len + 1), dtype=np.int64)
        owner = np.searchsorted(self.starts, index, side="right") - 1
        for row, (dataset, window) in enumerate(zip(owner, index - self.starts[owner], strict=True)):
            begin = int(window) * self.seq_len
            out[row] = self.splits[dataset].tokens[begin : begin + self.seq_len + 1]
            self.splits[dataset].check_ids(out[row], begin)
        return out

    def refuse_empty(self, *, each: bool) -> None:
        """Raise a DataError where there is no full window, or with `each` where a dataset has none."""
        empty = [number for number, count in enumerate(self.counts) if not count]
        if each and empty:
            raise DataError(
                f"dataset {empty[0] + 1} of {len(self.counts)} holds no full window of "
                f"{self.seq_len + 1} tokens",
                hint="leave it out, or use a smaller train.seq_len",
            )
        if not self.total:
            held = sum(split.num_tokens for split in self.splits)
            raise DataError(
                f"the training data holds {held} tokens, fewer than one window of train.seq_len + 1 = "
                f"{self.seq_len + 1}",
                hint=f"use train.seq_len <= {max(1, held - 1)}, or more text",
            )


def starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each dataset's samples begin in the index space of all, and where that ends."""
    return np.concatenate([[0], np.cumsum(counts)])


class Loader(Generic[T]):
    """Gives each rank its part of the batch of any step; holds no state."""

    def __init__(
        self,
        source: Samples[T],
        *,
        weights: Sequence[float],
        global_batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        replica_groups: int = 1,
    ) -> None:
        """Deal a step's samples to `world_size` ranks, neighbouring ones in each replica group."""
        source.refuse_empty(each=len(weights) > 1)
        self.source = source
        self._counts, self._starts = source.counts, starts(source.counts)
        self.total = int(self._starts[-1])
        self._quotas = _quotas(weights) if len(weights) > 1 else None
        self._batch = global_batch_size
        self._seed = seed
        self._share = global_batch_size // world_size
        self._first = rank * self._share
        self._of_group = global_batch_size // replica_groups
        self._first_of_group = rank * replica_groups // world_size * self._of_group

    @property
    def steps_per_epoch(self) -> float:
        """Steps that use each sample once (with weights: as many as there are)."""
        return self.total / self._batch

    def batch(self, step: int) -> Batch[T]:
        """Return this rank's samples of a step (1-based)."""
        samples = (step - 1) * self._batch + self._first + np.arange(self._share, dtype=np.int64)
        data = self.source.read(self.index(samples))
        return Batch(step, data, samples, self._of_group * self.source.targets)

    def announce_epoch(self, step: int) -> None:
        """Say so where an epoch begins in this step."""
        if epoch := self._epoch_begins(step):
            log.info(f"epoch {epoch} begins in step {step}")

    def step_samples(self, step: int) -> NDArray[np.int64]:
        """Return the places in the run of all samples of a step, over all ranks of this world."""
        first = (step - 1) * self._batch + self._first_of_group
        return first + np.arange(self._of_group, dtype=np.int64)

    def _epoch_begins(self, step: int) -> int:
        """Return the number (from 2) of an epoch whose first sample lies in this step, else 0."""
        before, after = (step - 1) * self._batch - 1, step * self._batch - 1
        epoch = after // self.total
        return epoch + 1 if step > 1 and epoch > before // self.total else 0

    def index(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map places in the run to samples of the datasets."""
        if self._quotas is None:
            return self._shuffle(samples, self.total, "all")
        out = np.empty_like(samples)
        block, place = np.divmod(samples, _MIX_BLOCK)
        slot = np.empty_like(place)
        for number in np.unique(block):
            here = block == number
            slot[here] = permute(place[here], _MIX_BLOCK, self._seed, "mix", int(number))
        bounds = starts(self._quotas)
        owner = np.searchsorted(bounds, slot, side="right") - 1
        for dataset, quota in enumerate(self._quotas):
            mine = owner == dataset
            drawn = block[mine] * quota + slot[mine] - bounds[dataset]
            local = self._shuffle(drawn, int(self._counts[dataset]), dataset)
            out[mine] = self._starts[dataset] + local
        return out

    def _shuffle(self, drawn: NDArray[np.int64], size: int, name: int | str) -> NDArray[np.int64]:
        """Turn the n-th draw from `size` samples into one of them, each once an epoch."""
        epoch, place = np.divmod(drawn, size)
        out = np.empty_like(place)
        for number in np.unique(epoch):
            here = epoch == number
            out[here] = permute(place[here], size, self._seed, name, int(number))
        return out


def fixed_sample(source: Samples[T], count: int) -> NDArray[np.int64]:
    """Choose `count` samples (or all there are) for evaluation: the same ones in every run and layout."""
    total = int(source.counts.sum())
    return permute(np.arange(min(count, total), dtype=np.int64), total, "evaluation")


def _quotas(weights: Sequence[float]) -> NDArray[np.int64]:
    """Share the places of a mix block by weight, largest remainders first."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * _MIX_BLOCK
    quotas = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind="stable")[: _MIX_BLOCK - quotas.sum()]] += 1
    if not quotas.all():
        raise ConfigError(
            f"data.weights = {list(weights)}: the smallest is below 1/{_MIX_BLOCK} of their sum",
            hint="raise it, or leave that dataset out",
        )
    return quotas
