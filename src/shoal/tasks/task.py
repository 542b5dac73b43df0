"""The task seam: what is trained on what. The trainer knows tasks, and no task knows the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.config.layout import Layout
from shoal.config.layout_rules import check_layout
from shoal.config.sections import Config
from shoal.data.loader import Loader, Samples
from shoal.models.loss import CrossEntropy
from shoal.models.part import Part
from shoal.models.shape import ModelShape
from shoal.tasks.feed import Arrays, EvalSet, Feed, HostBatch, make_eval_set, make_loader

T = TypeVar("T")
Micro = TypeVar("Micro")
Rows = list[tuple[str, str]]  # of the run summary: name and value


class Dataset(Protocol):
    """What a run remembers of its data."""

    @property
    def path(self) -> Path: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def digests(self) -> dict[Path, str]: ...


class Data(Protocol[T]):
    """What a task is trained on: tokens, or labelled examples."""

    @property
    def datasets(self) -> Sequence[Dataset]: ...

    @property
    def unit(self) -> str:
        """What targets are called: tokens, examples."""

    @property
    def sample(self) -> str:
        """What a sample is called: sequence, example."""

    def samples(self, split: str) -> Samples[T]:
        """Return the samples of a split of all datasets."""

    def without(self, split: str) -> str:
        """Say why a split has no sample."""

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint's state says of the data beside its fingerprints."""

    def files(self) -> dict[str, bytes]:
        """Return the files that each checkpoint holds a copy of."""

    def refuse_other(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Raise a DataError where weights of a checkpoint mean something else than this data's."""

    def rows(self, loader: Loader[T]) -> Rows: ...


class Task(ABC, Generic[T, Micro]):
    """Gives the trainer a model, a batch for each step, and sums of the loss to divide by what was counted.

    T is what samples are when read, Micro what a forward pass takes.
    """

    num_sums = 1  # that `forward_loss` returns in evaluation
    shape: ModelShape | None = None  # of a decoder; None: a network of fixed form, which is not cut

    def __init__(self, config: Config, data: Data[T]) -> None:
        """Take the configuration, with all that follows from the data filled in."""
        self.config = config
        self.data = data
        self.targets_per_step = config.train.global_batch_size * data.samples("train").targets

    def check(self, layout: Layout) -> None:
        """Raise a ConfigError where the model cannot be trained under a layout."""
        check_layout(self.config, layout, self.shape)

    def begin(
        self,
        rank: int,
        world_size: int,
        replica_groups: int,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[None]],
        cross_entropy: CrossEntropy,
    ) -> None:
        """Take a place among the ranks of data parallelism; from here on there are batches.

        Each replica group divides its loss by the targets of its own samples.
        """
        self.device = device
        self._autocast = autocast
        self._cross_entropy = cross_entropy
        self.loader = make_loader(self.config, self.data.samples("train"), rank, world_size, replica_groups)
        self._feed = Feed(
            self.loader,
            lambda batch: self.arrays(batch.data, batch.samples),
            self.config.train.micro_batch_size,
            device,
        )

    def batch(self, step: int) -> HostBatch:
        """Return this rank's share of a step, a pure function of datasets, seed and step."""
        return self._feed.batch(step)

    def micro_batches(self, batch: HostBatch) -> list[Micro]:
        """Cut a rank's share into the parts of one forward pass each, on the device."""
        return [self.micro(*parts) for parts in self._feed.micro_batches(batch)]

    def close(self) -> None:
        """Stop reading ahead."""
        self._feed.close()

    def eval_set(self, split: str) -> EvalSet[T] | None:
        """Choose the samples of an evaluation; None where the split has none."""
        return make_eval_set(self.config, self.data.samples(split))

    def eval_batches(
        self, subset: EvalSet[T], rank: int, world_size: int
    ) -> Iterator[tuple[Micro, int, int, bool]]:
        """Yield (micro-batch, samples, targets, whether they count), equally often on every rank."""
        for data, count, valid in subset.batches(rank, world_size):
            tensors = (torch.from_numpy(array).to(self.device) for array in self.arrays(data))
            yield self.micro(*tensors), count, count * subset.source.targets, valid

    @property
    @abstractmethod
    def flops_per_target(self) -> int:
        """Operations for one target, forward and backward."""

    @property
    @abstractmethod
    def num_parameters(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """Blocks of a decoder, or layers with weights of another network, which can be exchanged alone."""
        return self.shape.n_layers if self.shape else 1

    @abstractmethod
    def parts(self, layers: Sequence[range]) -> Sequence[Part]:
        """Make the parts of the model with these layers; a network of fixed form is one part."""

    @abstractmethod
    def arrays(self, data: T, samples: NDArray[np.int64] | None = None) -> Arrays:
        """Return what is to be on the device, each array with a row for each sample.

        `samples` are their places in the run; in evaluation they have none.
        """

    @abstractmethod
    def micro(self, *tensors: Tensor) -> Micro:
        """Make a micro-batch of rows of these arrays."""

    @abstractmethod
    def forward_loss(self, model: nn.Module, micro: Micro, inputs: Tensor | None = None) -> Tensor:
        """Return the loss summed over the targets of a micro-batch, in nats.

        In evaluation num_sums values, the loss first. A part of a model takes as `inputs` what the part
        before it returned, and returns what the next one takes; only the last returns the loss.
        """

    @abstractmethod
    def found(self, means: Sequence[float]) -> dict[str, float]:
        """Name the results of an evaluation, given the means of what `forward_loss` sums; the loss first."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint's state says of the model."""

    @abstractmethod
    def model_rows(self) -> Rows: ...
