"""Training of described networks: classification of labelled examples, or of each next token of a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal import scoring
from shoal.config.layout import Layout
from shoal.config.load import differences
from shoal.config.sections import Config
from shoal.data.examples import Pair
from shoal.errors import ConfigError
from shoal.networks.description import Description, Resolved, read
from shoal.networks.examples import ExampleData, open_example_sets
from shoal.networks.modules import Network
from shoal.tasks.feed import Arrays
from shoal.tasks.task import Data, Rows, Task
from shoal.tasks.tokens import open_tokens, with_vocabulary

T = TypeVar("T")
_FOR_TOKENS = ("train.seq_len", "eval.seq_len", "model.vocab_size")


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: inputs [samples, ...], and a class for each target."""

    inputs: Tensor
    targets: Tensor


class Classify(Task[T, MicroBatch]):
    """A described network that gives each target its class; evaluation also counts how many were right."""

    num_sums = 2

    def __init__(self, config: Config, data: Data[T], resolved: Resolved) -> None:
        super().__init__(config, data)
        self.resolved = resolved
        self._synchronised = config.model.batch_statistics == "synchronised"

    @cached_property
    def _blueprint(self) -> Network:
        with torch.device("meta"):
            return Network(self.resolved)

    @property
    def flops_per_target(self) -> int:
        return self._blueprint.flops_per_target

    @property
    def num_parameters(self) -> int:
        return self.resolved.num_parameters

    @property
    def num_blocks(self) -> int:
        return len({name.rpartition(".")[0] for name in self._blueprint.named_weights()})

    def parts(self, layers: Sequence[range]) -> list[Network]:
        """Make the network."""
        return [Network(self.resolved, synchronised=self._synchronised)]

    def check(self, layout: Layout) -> None:
        """Raise a ConfigError where the network cannot be trained under a layout."""
        super().check(layout)
        if self._synchronised and not self._blueprint.running_statistics():
            raise ConfigError(
                f"model.batch_statistics = synchronised with model.network = {self.config.model.network}, "
                "which has no batch normalisation",
                hint="leave model.batch_statistics out",
            )

    def micro(self, *tensors: Tensor) -> MicroBatch:
        """Make a micro-batch."""
        return MicroBatch(*tensors)

    def forward_loss(self, model: nn.Module, micro: MicroBatch, inputs: Tensor | None = None) -> Tensor:
        """Return the summed loss; in evaluation [2], with the number of right answers."""
        with self._autocast():
            logits = model(inputs=micro.inputs)
            if model.training:
                return self._cross_entropy(logits, micro.targets)
            right = (logits.argmax(dim=-1) == micro.targets).sum()
            return torch.stack((self._cross_entropy(logits, micro.targets), right.float()))

    def found(self, means: Sequence[float]) -> dict[str, float]:
        """Name loss and accuracy."""
        return {"loss": means[0], "accuracy": means[1]}

    def facts(self) -> dict[str, Any]:
        """Return the network's name, and a digest of its layers."""
        return {"network": self.config.model.network, "layers": self.resolved.digest}

    def model_rows(self) -> Rows:
        """Return the network's title."""
        return [("model", self.resolved.title or self.resolved.name)]


def open_network(config: Config) -> Classify[Any]:
    """Open the data of a described network, tokens or labelled examples, and work out its sizes."""
    description = read(config.model.network)
    if config.model.network.endswith(".toml"):  # a later start may be made in another folder
        network = str(Path(config.model.network).absolute())
        config = config.model_copy(update={"model": config.model.model_copy(update={"network": network})})
    return (ClassifyTokens if description.tokens else ClassifyExamples)(config, description)


class ClassifyExamples(Classify[Pair]):
    """A network on labelled examples, standardised by mean and deviation of the training inputs."""

    data: ExampleData

    def __init__(self, config: Config, description: Description) -> None:
        for name, value, default in differences(config, Config()):
            if name in _FOR_TOKENS:
                raise ConfigError(
                    f"{name} = {value} with model.network = {config.model.network}, which does not read it",
                    hint=f"leave it out ({name} = {default})",
                )
        data = open_example_sets(config)
        first = data.datasets[0]
        shape = (1, *first.shape) if len(first.shape) == 2 else tuple(first.shape)  # one channel
        super().__init__(config, data, description.resolve(shape, first.num_classes))

    def arrays(self, data: Pair, samples: NDArray[np.int64] | None = None) -> Arrays:
        """Return inputs as they are kept, and labels."""
        return data

    def micro(self, *tensors: Tensor) -> MicroBatch:
        """Make a micro-batch of standardised inputs."""
        inputs, labels = tensors
        first = self.data.datasets[0]
        return MicroBatch((inputs.float() - first.mean) / first.std, labels)


class ClassifyTokens(Classify[NDArray[np.int64]]):
    """A network on token datasets: the class of each step is the next token."""

    def __init__(self, config: Config, description: Description) -> None:
        data = open_tokens(config)
        if config.model.vocab_size not in (0, data.vocab_size):
            raise ConfigError(
                f"model.vocab_size = {config.model.vocab_size} is not the data's {data.vocab_size}",
                hint="leave it at 0 to take the data's",
            )
        config = with_vocabulary(config, data.vocab_size)
        data = replace(data, config=config)
        super().__init__(config, data, description.resolve((config.train.seq_len,), data.vocab_size))

    def arrays(self, data: NDArray[np.int64], samples: NDArray[np.int64] | None = None) -> Arrays:
        """Return the tokens."""
        return (data,)

    def micro(self, *tensors: Tensor) -> MicroBatch:
        """Make a micro-batch of windows."""
        return MicroBatch(tensors[0][:, :-1], tensors[0][:, 1:])

    def found(self, means: Sequence[float]) -> dict[str, float]:
        """Name loss, perplexity and accuracy."""
        return {"loss": means[0], "perplexity": scoring.perplexity(means[0]), "accuracy": means[1]}

    def facts(self) -> dict[str, Any]:
        """Return the network's name, a digest of its layers, and the vocabulary."""
        return {**super().facts(), "vocab_size": self.config.model.vocab_size}
