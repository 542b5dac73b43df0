"""`shoal export`: a checkpoint of any layout becomes a folder that transformers loads without our code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.manifest import WEIGHTS, read_decoder, read_state, resolve_checkpoint
from shoal.checkpoint.tensors import mismatches, read_folder, refuse_mismatches, saved_shapes, write_file
from shoal.data.chat import CONFIG_NAME, TEMPLATE_NAME, read_chat
from shoal.data.tokenizer import JSON_NAME, MODEL_NAME
from shoal.interop.hugging_face import card, config_json, tokenizer_config
from shoal.interop.tables import EMBEDDINGS, Entry, family_of, table
from shoal.models.shape import ModelShape
from shoal.runtime.files import new_folder

SHARD_BYTES = 1 << 30
_READ_BYTES = 128 << 20  # at a time: each read looks into the headers of all files


def export(path: Path, target: Path, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the checkpoint at `path` as the new folder `target`; return the checkpoint.

    Tensor by tensor: no more than one output file is in memory. The folder appears when it is complete.
    """
    with new_folder(target) as hidden:
        checkpoint = resolve_checkpoint(path)
        shape, eod_id = read_decoder(checkpoint)
        _write_weights(hidden, checkpoint, shape, shard_bytes)
        _write_texts(hidden, checkpoint, shape, eod_id)
    return checkpoint


def _write_weights(folder: Path, checkpoint: Path, shape: ModelShape, shard_bytes: int) -> None:
    entries = table(family_of(shape), shape)
    saved = saved_shapes(checkpoint, [WEIGHTS])
    ours = [name for entry in entries for name in entry.ours]
    wanted = {f"{WEIGHTS}.{name}": saved.get(f"{WEIGHTS}.{name}", torch.Size()) for name in ours}
    refuse_mismatches(checkpoint, mismatches(saved, wanted))
    shapes = {name: saved[f"{WEIGHTS}.{name}"] for name in ours}
    shards = list(_shards(entries, shapes, shard_bytes))
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        )
        tensors: dict[str, Tensor] = {}
        for batch in _shards(shard, shapes, min(shard_bytes, _READ_BYTES)):
            tensors |= _theirs(batch, checkpoint, shapes, shape)
        write_file(folder / file, tensors)
        names |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(entries: list[Entry], shapes: dict[str, torch.Size], shard_bytes: int) -> Iterator[list[Entry]]:
    """Group entries into files of at most `shard_bytes` of fp32, or of one tensor."""
    shard: list[Entry] = []
    filled = 0
    for entry in entries:
        size = 4 * sum(shapes[name].numel() for name in entry.ours)
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(entry)
        filled += size
    yield shard


def _theirs(
    entries: list[Entry], checkpoint: Path, shapes: dict[str, torch.Size], shape: ModelShape
) -> dict[str, Tensor]:
    """Read what some entries hold, stacked, turned and without padding, as their files have it."""
    tensors = {name: torch.empty(shapes[name]) for entry in entries for name in entry.ours}
    read_folder(checkpoint / WEIGHTS, tensors, None)
    found = {}
    for entry in entries:
        used = [tensors[n][: shape.vocab_size] if n in EMBEDDINGS else tensors[n] for n in entry.ours]
        whole = torch.cat(used) if len(used) > 1 else used[0]
        found[entry.theirs] = whole.T.contiguous() if entry.transposed else whole.contiguous()
    return found


def _write_texts(folder: Path, checkpoint: Path, shape: ModelShape, eod_id: int) -> None:
    from tokenizers import Tokenizer

    files: dict[str, Any] = {
        "config.json": config_json(shape, eod_id),
        "generation_config.json": {"bos_token_id": eod_id, "eos_token_id": eod_id},
    }
    held = [name for name in (JSON_NAME, MODEL_NAME) if (checkpoint / name).is_file()]
    for name in held:
        shutil.copyfile(checkpoint / name, folder / name)
    if JSON_NAME in held:
        word = Tokenizer.from_str((checkpoint / JSON_NAME).read_text(encoding="utf-8")).id_to_token(eod_id)
        template, tokens = read_chat(checkpoint)
        files[CONFIG_NAME] = tokenizer_config(shape, word) | (tokens if template is not None else {})
        if template is not None:
            (folder / TEMPLATE_NAME).write_text(template, encoding="utf-8")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    (folder / "README.md").write_text(card(shape, read_state(checkpoint), has_tokenizer=JSON_NAME in held))
