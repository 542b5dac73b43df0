"""Language modelling: predict each next token of a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data.ahead import Ahead
from shoal.data.loader import Batch, Loader, Windows, fixed_sample
from shoal.models.documents import document_ids
from shoal.models.loss import CrossEntropy


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: tokens_bt [sequences, seq_len + 1]; with keys, dropout is on."""

    tokens_bt: Tensor
    dropout_keys_b: Tensor | None


@dataclass(frozen=True)
class HostBatch(Batch):
    """A rank's share as tensors, too, in page-locked memory where the device is a GPU."""

    tokens_bt: Tensor
    dropout_keys_b: Tensor


class Gpt:
    """The task seam: a batch for a step, and the summed loss of a model on a part of it."""

    def __init__(
        self,
        loader: Loader,
        *,
        seed: int,
        micro_batch_size: int,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        cross_entropy: CrossEntropy | None = None,
        reset_after: int | None = None,
    ) -> None:
        """Make the task; documents that end in token `reset_after` do not see each other."""
        self.loader = loader
        self._autocast = autocast
        self._cross_entropy = cross_entropy or CrossEntropy()
        self._reset_after = reset_after
        self._seed = seed
        self._micro = micro_batch_size
        self._device = device
        # A new thread sits on GPU 0, where its first CUDA call would make a context of its own.
        seat = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
        self._ahead = Ahead(self._read, seat)

    def batch(self, step: int) -> HostBatch:
        """Return this rank's share of a step, read during the step before it; say where an epoch begins."""
        self.loader.announce_epoch(step)
        return self._ahead.get(step)

    def close(self) -> None:
        """Stop reading ahead."""
        self._ahead.close()

    def _read(self, step: int) -> HostBatch:
        """Read a rank's share into host memory. Runs in the background."""
        batch = self.loader.batch(step)
        parts = (torch.from_numpy(a) for a in (batch.tokens, dropout_keys(self._seed, batch.samples)))
        tokens, keys = (part.pin_memory() if self._device.type == "cuda" else part for part in parts)
        return HostBatch(batch.step, batch.tokens, batch.samples, batch.global_tokens, tokens, keys)

    def micro_batches(self, batch: HostBatch) -> list[MicroBatch]:
        """Cut a rank's share into the parts of one forward pass each, on the device; waits for no copy."""
        tokens = batch.tokens_bt.to(self._device, non_blocking=True)
        keys = batch.dropout_keys_b.to(self._device, non_blocking=True)
        return [
            MicroBatch(*parts)
            for parts in zip(tokens.split(self._micro), keys.split(self._micro), strict=True)
        ]

    def run(self, model: nn.Module, micro: MicroBatch, inputs: Tensor | None = None) -> Tensor:
        """Return the loss summed over the targets of a micro-batch, in nats.

        A part of a model takes as `inputs` what the part before it returned, and returns what the next one
        takes; only the last returns the loss.
        """
        tokens_bt, targets_bt = micro.tokens_bt[:, :-1], micro.tokens_bt[:, 1:]
        ends = self._reset_after
        with self._autocast():
            y = model(
                tokens_bt if inputs is None else inputs,
                dropout_keys_b=micro.dropout_keys_b,
                documents_bt=None if ends is None else document_ids(tokens_bt, ends),
            )
            return self._cross_entropy(y, targets_bt) if getattr(model, "is_last", True) else y


@dataclass(frozen=True)
class EvalSet:
    """A fixed sample of a split's windows, dealt to the ranks in turn."""

    windows: Windows
    sequences: int
    batch_size: int

    def batches(self, rank: int, world_size: int, device: torch.device) -> Iterator[tuple[Tensor, bool]]:
        """Yield (tokens_bt [<= batch_size, seq_len + 1], whether they count), equally often on every rank.

        A rank that has run out yields another's window, so that collectives line up.
        """
        index = fixed_sample(self.windows, self.sequences)
        mine = index[rank::world_size]
        rounds = -(-len(index[::world_size]) // self.batch_size)
        for number in range(rounds):
            part = mine[number * self.batch_size : (number + 1) * self.batch_size]
            own = part if len(part) else index[:1]
            yield torch.from_numpy(self.windows.read(own)).to(device), bool(len(part))


def dropout_keys(seed: int, samples: np.ndarray) -> np.ndarray:
    """Return an int64 key for each sample of the run; the model's dropout hashes it further."""
    with np.errstate(over="ignore"):
        mixed = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed.view(np.int64)
