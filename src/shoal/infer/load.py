"""Everything that inference needs, from the checkpoint alone: shape, vocabulary, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shoal.checkpoint.manifest import read_state, read_text, resolve_checkpoint
from shoal.checkpoint.tensors import load_weights
from shoal.config.layout_rules import check_tensor_cut
from shoal.config.load import config_from_toml
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.errors import CheckpointError, InputError
from shoal.infer.generate import Row, generate
from shoal.infer.sampling import Sampling
from shoal.models.decoder import Decoder
from shoal.models.shape import resolve_shape
from shoal.parallel.tensor import cut_for_inference


@dataclass(frozen=True)
class TextModel:
    """A model with the tokenizer it was trained with, and the id that ends a document."""

    model: Decoder
    tokenizer: Tokenizer
    eod_id: int
    checkpoint: Path
    lead: Callable[[Sequence[Row], Sampling], None] | None = (
        None  # tells other processes what to compute, too
    )

    def generate(self, rows: Sequence[Row], sampling: Sampling) -> Iterator[tuple[int, int]]:
        """Yield (row number, token id), a token for each unfinished row in turn; see infer.generate."""
        if self.lead is not None:
            self.lead(rows, sampling)
        return generate(self.model, rows, sampling, self.eod_id)

    def led_by(self, lead: Callable[[Sequence[Row], Sampling], None]) -> TextModel:
        """Return this model with what is to be called before each generation."""
        return replace(self, lead=lead)


def load_text_model(path: Path, device: torch.device, *, tp: int = 1) -> TextModel:
    """Load the newest good checkpoint of a run folder, or the checkpoint `path` itself.

    Its files are verified before anything in them is used. With `tp` above 1 each of the processes in the
    default group, as many, gets its part, and their logits are whole. Collective over them.
    """
    checkpoint = resolve_checkpoint(path)
    state = read_state(checkpoint)
    config = config_from_toml(read_text(checkpoint, "config.toml"), str(checkpoint / "config.toml"))
    if config.model.network != "decoder":
        raise InputError(
            f"{checkpoint} holds the network {config.model.network}: only decoders write text",
            hint="give a run of a GPT, such as `shoal train tiny` makes",
        )
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
    check_tensor_cut(shape, tp)
    with torch.device("meta"):
        model = Decoder(shape)
    if tp > 1:
        cut_for_inference(model, init_device_mesh(device.type, (tp,)))
    model.to_empty(device=device)
    load_weights(checkpoint, model, dist.group.WORLD if tp > 1 else None)
    return TextModel(model.eval(), tokenizer, eod_id, checkpoint)
