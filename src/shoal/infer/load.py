"""Everything that inference needs, from the checkpoint alone: shape, vocabulary, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.checkpoint.manifest import read_decoder, resolve_checkpoint
from shoal.checkpoint.tensors import load_weights
from shoal.config.layout_rules import check_tensor_cut
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.errors import CheckpointError, InputError
from shoal.infer.generate import GeneratedRow, generate
from shoal.infer.sampling import Sampling
from shoal.infer.score import Score, Span, score
from shoal.interop.foreign import Told, open_foreign
from shoal.interop.hugging_face import is_hugging_face
from shoal.interop.importing import named_weights
from shoal.models.decoder import Decoder
from shoal.parallel.tensor import cut_for_inference


@dataclass(frozen=True)
class TextModel:
    """A model with the tokenizer it was trained with, and the id that ends a document."""

    model: Decoder
    tokenizer: Tokenizer
    eod_id: int
    checkpoint: Path
    replica: int = 0
    num_replicas: int = 1  # that share out what is scored
    lead: Callable[..., None] | None = None  # tells other processes what to compute, too: method, arguments

    def generate(self, rows: Sequence[GeneratedRow], sampling: Sampling) -> Iterator[tuple[int, int]]:
        """Yield (row number, token id), a token for each unfinished row in turn; see infer.generate."""
        if self.lead is not None:
            self.lead("generate", rows, sampling)
        return generate(self.model, rows, sampling, self.eod_id)

    def score(self, spans: Sequence[Span], batch_size: int) -> list[Score]:
        """Score spans in batches, which the replicas share out. Collective over them; see infer.score.

        Which spans are computed together does not depend on the replicas, and so neither do the scores.
        """
        if self.lead is not None:
            self.lead("score", spans, batch_size)
        batches = [spans[n : n + batch_size] for n in range(0, len(spans), batch_size)]
        own = [score(self.model, batch) for batch in batches[self.replica :: self.num_replicas]]
        if self.num_replicas == 1:
            return [one for part in own for one in part]
        parts: list[tuple[int, list[list[Score]]]] = [(0, [])] * dist.get_world_size()
        dist.all_gather_object(parts, (self.replica, own))
        of_replica = dict(parts)
        places = (divmod(n, self.num_replicas) for n in range(len(batches)))
        return [one for place, replica in places for one in of_replica[replica][place]]

    def led_by(self, lead: Callable[..., None]) -> TextModel:
        """Return this model with what is to be called before other processes have to compute, too."""
        return replace(self, lead=lead)


def load_text_model(path: Path, device: torch.device, *, tp: int = 1) -> TextModel:
    """Load the newest good checkpoint of a run folder, a checkpoint, or a Hugging Face folder.

    Its files are verified before anything in them is used. Where there is a default group, its processes are
    replicas, each of `tp` processes that have a part of the model and whole logits. Collective over it.
    """
    replica, num_replicas, mesh = 0, 1, None
    if dist.is_initialized():
        sizes = (dist.get_world_size() // tp, tp)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replica", "tp"))
        replica, num_replicas = mesh.get_local_rank("replica"), sizes[0]
    checkpoint = resolve_for(path, tp)
    if is_hugging_face(checkpoint):
        model, tokenizer, eod_id = load_foreign(checkpoint, device)
    else:
        model, eod_id = load_decoder(checkpoint, device, mesh["tp"] if mesh is not None and tp > 1 else None)
        tokenizer = load_tokenizer(checkpoint)
    if tokenizer.vocab_size > model.shape.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {checkpoint} has {tokenizer.vocab_size} ids, its model "
            f"{model.shape.vocab_size}",
            hint="put back the tokenizer of the training data",
        )
    return TextModel(model, tokenizer, eod_id, checkpoint, replica, num_replicas)


def resolve_for(path: Path, tp: int) -> Path:
    """Return the newest good checkpoint of a run folder; a checkpoint and a Hugging Face folder as they are.

    Raises an InputError or ConfigError where its model cannot be cut over `tp` processes.
    """
    if is_hugging_face(path):
        if tp > 1:
            raise InputError(
                f"{path} is a Hugging Face folder, which tensor parallelism does not support",
                hint=f"make a checkpoint of it first: shoal import {path} NEW",
            )
        return path
    checkpoint = resolve_checkpoint(path)
    check_tensor_cut(read_decoder(checkpoint)[0], tp)
    return checkpoint


def load_decoder(
    checkpoint: Path, device: torch.device, mesh: DeviceMesh | None = None
) -> tuple[Decoder, int]:
    """Load a checkpoint's model, or this rank's part along `mesh`; return it and the id that ends texts."""
    shape, eod_id = read_decoder(checkpoint)
    with torch.device("meta"):
        model = Decoder(shape)
    if mesh is not None:
        cut_for_inference(model, mesh)
    model.to_empty(device=device)
    load_weights(checkpoint, model, dist.group.WORLD if mesh is not None else None)
    return model.eval(), eod_id


def load_foreign(path: Path, device: torch.device) -> tuple[Decoder, Tokenizer, int]:
    """Load a Hugging Face folder as it is; it cannot be cut before it is imported."""
    foreign = open_foreign(path, Told())
    entries = foreign.entries()  # refuses a shape that its files do not hold, before room is made for it
    tokenizer = load_tokenizer(path)
    with torch.device("meta"):
        model = Decoder(foreign.shape)
    model.to_empty(device=device)
    weights = model.named_weights()
    with torch.no_grad():
        for name, tensor in named_weights(foreign, entries):
            weights[name].copy_(tensor)
    return model.eval(), tokenizer, tokenizer.eod_id if foreign.eod_id is None else foreign.eod_id
