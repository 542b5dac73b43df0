"""Everything that inference needs, from the checkpoint alone: shape, vocabulary, tokenizer and weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.checkpoint.manifest import read_state, read_text, resolve_checkpoint
from shoal.checkpoint.tensors import load_weights
from shoal.config.load import config_from_toml
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.errors import CheckpointError
from shoal.models.decoder import Decoder
from shoal.models.shape import resolve_shape


@dataclass(frozen=True)
class TextModel:
    """A model with the tokenizer it was trained with, and the id that ends a document."""

    model: Decoder
    tokenizer: Tokenizer
    eod_id: int
    checkpoint: Path


def load_text_model(path: Path, device: torch.device) -> TextModel:
    """Load the newest good checkpoint of a run folder, or the checkpoint `path` itself.

    Its files are verified before anything in them is used.
    """
    checkpoint = resolve_checkpoint(path)
    state = read_state(checkpoint)
    config = config_from_toml(read_text(checkpoint, "config.toml"), str(checkpoint / "config.toml"))
    tokenizer = load_tokenizer(checkpoint)
    try:
        vocab_size, eod_id = int(state["vocab_size"]), int(state["eod_id"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the state of checkpoint {checkpoint} lacks or garbles {error}") from error
    shape = resolve_shape(config.model, vocab_size)
    if tokenizer.vocab_size > shape.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {checkpoint} has {tokenizer.vocab_size} ids, its model {shape.vocab_size}",
            hint="put back the tokenizer of the training data",
        )
    with torch.device("meta"):
        model = Decoder(shape)
    model.to_empty(device=device)
    load_weights(checkpoint, model)
    return TextModel(model.eval(), tokenizer, eod_id, checkpoint)
