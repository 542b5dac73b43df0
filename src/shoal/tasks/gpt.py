"""Language modelling: a decoder predicts each next token of a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal import scoring
from shoal.config.sections import Config
from shoal.data.dataset import Dataset
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.errors import ConfigError
from shoal.models.counts import count_parameters, flops_per_token
from shoal.models.decoder import Decoder
from shoal.models.documents import document_ids
from shoal.models.shape import ModelShape, resolve_shape
from shoal.tasks.feed import Arrays
from shoal.tasks.task import Rows, Task
from shoal.tasks.tokens import TokenData, open_tokens, with_vocabulary


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: tokens_bt [sequences, seq_len + 1]; with keys, dropout is on.

    With a `place`, the logits of the token after that one are asked for, in place of the loss.
    """

    tokens_bt: Tensor
    dropout_keys_b: Tensor | None = None
    place: int | None = field(default=None, kw_only=True)


class Gpt(Task[NDArray[np.int64], MicroBatch]):
    """A decoder on token datasets; with data.reset_documents, documents do not see each other."""

    shape: ModelShape
    data: TokenData
    tokenizer: Tokenizer  # where there is an eval.prompt

    def __init__(self, config: Config) -> None:
        data = open_tokens(config)
        if config.eval.prompt:
            self.tokenizer = _tokenizer_for_prompt(data.datasets[0])
        self.shape = resolve_shape(config.model, data.vocab_size)
        config = with_vocabulary(config, self.shape.vocab_size)
        super().__init__(config, replace(data, config=config))
        self._reset_after = data.eod_id if config.data.reset_documents else None

    @property
    def flops_per_target(self) -> int:
        return flops_per_token(self.shape, self.config.train.seq_len)

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.shape).total

    def parts(self, layers: Sequence[range]) -> list[Decoder]:
        """Make a decoder, or parts of one."""
        return [Decoder(self.shape, some) for some in layers]

    def arrays(self, data: NDArray[np.int64], samples: NDArray[np.int64] | None = None) -> Arrays:
        """Return tokens, and in training dropout keys."""
        return (data,) if samples is None else (data, dropout_keys(self.config.train.seed, samples))

    def micro(self, *tensors: Tensor) -> MicroBatch:
        """Make a micro-batch."""
        return MicroBatch(*tensors)

    def forward_loss(self, model: nn.Module, micro: MicroBatch, inputs: Tensor | None = None) -> Tensor:
        """Return the summed loss, or what the next part of the model takes."""
        tokens_bt, targets_bt = micro.tokens_bt[:, :-1], micro.tokens_bt[:, 1:]
        ends = self._reset_after
        with self._autocast():
            y = model(
                tokens_bt if inputs is None else inputs,
                dropout_keys_b=micro.dropout_keys_b,
                documents_bt=None if ends is None else document_ids(tokens_bt, ends),
            )
            if not getattr(model, "is_last", True):
                return y
            if micro.place is not None:
                return self._cross_entropy.whole(y[:, micro.place])
            return self._cross_entropy(y, targets_bt)

    def window(self, ids: Sequence[int]) -> MicroBatch:
        """Return the last train.seq_len tokens of a text, for the logits of the next one.

        It has the size that training has, whatever the layout; what fills it is not seen.
        """
        seq_len, own = self.config.train.seq_len, ids[-self.config.train.seq_len :]
        filled = [*own, *[self.data.eod_id] * (seq_len + 1 - len(own))]
        return MicroBatch(torch.tensor([filled], device=self.device), place=len(own) - 1)

    def found(self, means: Sequence[float]) -> dict[str, float]:
        """Name loss and perplexity."""
        return {"loss": means[0], "perplexity": scoring.perplexity(means[0])}

    def facts(self) -> dict[str, Any]:
        """Return the true and the padded vocabulary."""
        return {"vocab_size": self.shape.vocab_size, "padded_vocab_size": self.shape.padded_vocab_size}

    def model_rows(self) -> Rows:
        """Say what the decoder is."""
        shape = self.shape
        return [
            (
                "model",
                f"{shape.style}: {shape.n_layers} layers x {shape.d_model} wide x {shape.n_heads} heads",
            ),
            (
                "vocabulary",
                f"{shape.vocab_size:,}, padded to {shape.padded_vocab_size:,}; "
                f"end of document {self.data.facts()['eod_id']}",
            ),
        ]


def _tokenizer_for_prompt(dataset: Dataset) -> Tokenizer:
    if dataset.tokenizer_path is None:
        raise ConfigError(
            f"eval.prompt needs a tokenizer, and {dataset.path} has none", hint="leave eval.prompt empty"
        )
    return load_tokenizer(dataset.tokenizer_path)


def dropout_keys(seed: int, samples: np.ndarray) -> np.ndarray:
    """Return an int64 key for each sample of the run; the model's dropout hashes it further."""
    with np.errstate(over="ignore"):
        mixed = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed.view(np.int64)
