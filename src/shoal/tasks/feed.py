"""What every task does with samples: read them ahead, hand them to the device, deal out an evaluation's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.config.sections import Config
from shoal.data.loader import Batch, Loader, Samples, fixed_sample

T = TypeVar("T")
Arrays = tuple[NDArray[np.generic], ...]


HostBatch = Batch[tuple[Tensor, ...]]  # in page-locked memory where the device is a GPU


class Ahead(Generic[T]):
    """Gives `make(step)` and has a thread make the next one. `make` is a pure function: nothing to save."""

    def __init__(self, make: Callable[[int], T], in_thread: Callable[[], None] | None = None) -> None:
        """Make in one background thread, which calls `in_thread` first."""
        self._make = make
        self._thread = ThreadPoolExecutor(1, "ahead", in_thread)
        self._next: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """Return what was made for `step`, made now if another one was expected; start on the step after it.

        An error of the making is raised here, in the step that it belongs to, with its own traceback.
        """
        expected, future = self._next or (0, None)
        if future is None or expected != step:
            future = self._thread.submit(self._make, step)
        self._next = step + 1, self._thread.submit(self._make, step + 1)
        return future.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


class Feed(Generic[T]):
    """Gives a rank its share of any step, read during the step before it."""

    def __init__(
        self,
        loader: Loader[T],
        arrays: Callable[[Batch[T]], Arrays],
        micro_batch_size: int,
        device: torch.device,
    ) -> None:
        """Take what turns a batch into the arrays that the task wants on the device."""
        self.loader = loader
        self._arrays = arrays
        self._micro = micro_batch_size
        self._device = device
        # A new thread sits on GPU 0, where its first CUDA call would make a context of its own.
        prepare = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
        self._ahead = Ahead(self._read, prepare)

    def batch(self, step: int) -> HostBatch:
        """Return this rank's share of a step; say where an epoch begins."""
        self.loader.announce_epoch(step)
        return self._ahead.get(step)

    def micro_batches(self, batch: HostBatch) -> list[tuple[Tensor, ...]]:
        """Cut a rank's share into the parts of one forward pass each, on the device; waits for no copy."""
        whole = (tensor.to(self._device, non_blocking=True) for tensor in batch.data)
        return list(zip(*(tensor.split(self._micro) for tensor in whole), strict=True))

    def close(self) -> None:
        """Stop reading ahead."""
        self._ahead.close()

    def _read(self, step: int) -> HostBatch:
        """Read a rank's share into host memory. Runs in the background."""
        batch = self.loader.batch(step)
        tensors = map(torch.from_numpy, self._arrays(batch))
        held = tuple(t.pin_memory() if self._device.type == "cuda" else t for t in tensors)
        return Batch(batch.step, held, batch.samples, batch.global_targets)


@dataclass(frozen=True)
class EvalSet(Generic[T]):
    """A fixed sample of a split, dealt to the ranks in turn."""

    source: Samples[T]
    num_samples: int
    batch_size: int

    def batches(self, rank: int, world_size: int) -> Iterator[tuple[T, int, bool]]:
        """Yield (samples as read, their number, whether they count), equally often on every rank.

        A rank that has run out yields another's sample, so that collectives line up.
        """
        index = fixed_sample(self.source, self.num_samples)
        mine = index[rank::world_size]
        rounds = -(-len(index[::world_size]) // self.batch_size)
        for number in range(rounds):
            part = mine[number * self.batch_size : (number + 1) * self.batch_size]
            own = part if len(part) else index[:1]
            yield self.source.read(own), len(own), bool(len(part))


def make_loader(
    config: Config, source: Samples[T], rank: int, world_size: int, replica_groups: int
) -> Loader[T]:
    """Return what draws the samples of each step; ranks are those of data parallelism."""
    return Loader(
        source,
        weights=config.data.weights,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        rank=rank,
        world_size=world_size,
        replica_groups=replica_groups,
    )


def make_eval_set(config: Config, source: Samples[T]) -> EvalSet[T] | None:
    """Choose the samples of an evaluation; None where there are none."""
    total = int(source.counts.sum())
    size = config.eval.batch_size or config.train.micro_batch_size
    return EvalSet(source, min(config.eval.sequences, total), size) if total else None
