"""Token datasets as what a task is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.config.sections import Config
from shoal.data.dataset import Dataset, open_dataset
from shoal.data.identity import refuse_other_tokenizer
from shoal.data.loader import Loader, Windows
from shoal.errors import DataError


@dataclass(frozen=True)
class TokenData:
    """Datasets with one tokenizer, cut into windows."""

    config: Config
    datasets: tuple[Dataset, ...]
    unit = "tokens"
    sample = "sequence"

    @property
    def vocab_size(self) -> int:
        return self.datasets[0].vocab_size

    @property
    def eod_id(self) -> int:
        return self.datasets[0].eod_id

    def samples(self, split: str) -> Windows:
        """Return the windows of a split: of train.seq_len, or eval.seq_len where it is for evaluation."""
        seq_len = (self.config.eval.seq_len if split != "train" else 0) or self.config.train.seq_len
        splits = (dataset.split(split) for dataset in self.datasets)
        return Windows([found for found in splits if found is not None], seq_len)

    def without(self, split: str) -> str:
        """Say why a split has no sample."""
        windows = self.samples(split)
        held = sum(part.num_tokens for part in windows.splits)
        return f"the split holds {held} tokens, fewer than one window of {windows.seq_len + 1}"

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint's state says of the data."""
        return {"eod_id": self.eod_id}

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer."""
        path = self.datasets[0].tokenizer_path
        return {} if path is None else {path.name: path.read_bytes()}

    def refuse_other(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Raise a DataError where a checkpoint was trained with other token ids."""
        theirs = (state["vocab_size"], state["eod_id"])
        ours = (self.config.model.vocab_size, self.eod_id)
        if theirs != ours:
            raise DataError(
                f"{checkpoint} was trained with {theirs[0]} token ids, end of document {theirs[1]}; "
                f"the data has {ours[0]}, end of document {ours[1]}",
                hint=f"prepare the data with --tokenizer {checkpoint / 'tokenizer.json'}",
            )
        allow = self.config.data.allow_tokenizer_mismatch
        refuse_other_tokenizer(checkpoint, self.datasets[0].tokenizer_path, allow=allow)

    def rows(self, loader: Loader[NDArray[np.int64]]) -> list[tuple[str, str]]:
        """Say how long an epoch, a step and the run are."""
        windows, train = self.samples("train"), self.config.train
        tokens = train.global_batch_size * train.seq_len
        return [
            (
                "epoch",
                f"{windows.total:,} windows of {train.seq_len} tokens = "
                f"{loader.steps_per_epoch:,.1f} steps; "
                f"{windows.tail_tokens:,} tokens at the ends fill no window",
            ),
            ("step", f"{train.global_batch_size} sequences = {tokens:,} tokens"),
            (
                "in all",
                f"{train.steps:,} steps = {train.steps * tokens:,} tokens = "
                f"{train.steps / loader.steps_per_epoch:.2f} epochs",
            ),
        ]


def open_tokens(config: Config) -> TokenData:
    """Open the datasets; refuse several with different tokenizers."""
    datasets = tuple(open_dataset(Path(path)) for path in config.data.datasets)
    first = datasets[0]
    for other in datasets[1:]:
        if (other.vocab_size, other.eod_id) != (first.vocab_size, first.eod_id):
            raise DataError(
                f"{first.path} has {first.vocab_size} token ids and {other.path} has {other.vocab_size}: "
                "datasets that are mixed need the same tokenizer",
                hint=f"prepare {other.path} with --tokenizer {first.tokenizer_path}",
            )
        allow = config.data.allow_tokenizer_mismatch
        refuse_other_tokenizer(first.tokenizer_path, other.tokenizer_path, allow=allow)
    return TokenData(config, datasets)


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """Return a configuration whose vocabulary is the data's."""
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocab_size})})
