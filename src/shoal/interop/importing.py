"""`shoal import`: another program's checkpoint becomes one of ours, file by file."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from shoal.checkpoint import commit
from shoal.checkpoint.manifest import MANIFEST, STATE, WEIGHTS, Manifest, file_entry, resolve_checkpoint
from shoal.checkpoint.tensors import FILE_BYTES, write_file
from shoal.config.load import to_toml
from shoal.config.sections import Config
from shoal.data.chat import chat_files
from shoal.data.tokenizer import JSON_NAME, MODEL_NAME, parse_tokenizer, read_tokenizer
from shoal.errors import CheckpointError, DataError, InputError, counted
from shoal.interop.foreign import Foreign, Told, open_foreign
from shoal.interop.hugging_face import is_hugging_face
from shoal.interop.tables import EMBEDDINGS, Entry, table
from shoal.models.shape import ModelShape
from shoal.runtime.files import disk_error, new_folder


@dataclass(frozen=True)
class Wanted:
    """What goes with the files: their missing facts, a tokenizer, the id that ends a document."""

    told: Told = field(default_factory=Told)
    tokenizer: Path | None = None
    eod_id: int | None = None


def as_checkpoint(path: Path, folder: Path) -> Path:
    """Return the verified checkpoint that `path` names; import a Hugging Face folder into `folder` first.

    It is imported once for all processes that share `folder`, and again after its files have changed.
    """
    if not is_hugging_face(path):
        return resolve_checkpoint(path)
    files = sorted(file for file in path.iterdir() if file.is_file())
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = xxhash.xxh3_64_hexdigest(json.dumps([str(path.resolve()), facts]).encode())
    target = folder / f"init-{digest[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".init.lock").open("w")
    except OSError as error:
        raise disk_error(error, folder) from error
    with lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            run(path, target, Wanted())
    return resolve_checkpoint(target)


def run(path: Path, target: Path, wanted: Wanted) -> None:
    """Import `path` as the checkpoint `target`, a new folder; print what came along and what did not."""
    if not path.exists():
        raise InputError(f"{path} does not exist", hint="give the folder or file of the other program")
    foreign = open_foreign(path, wanted.told)
    entries = foreign.entries()
    tokenizer, eod_id = _vocabulary(foreign, wanted)
    with new_folder(target) as hidden:
        _write_folder(hidden / WEIGHTS, named_weights(foreign, entries))
        if foreign.moments is not None:
            _write_folder(hidden / "optimizer", _moments(foreign, entries))
        config = to_toml(Config(model=foreign.model))
        state = json.dumps(_state(foreign, eod_id), indent=1)
        commit.write_files(hidden, {"config.toml": config.encode(), STATE: state.encode(), **tokenizer})
        files = {str(file.relative_to(hidden)): file for file in sorted(hidden.rglob("*")) if file.is_file()}
        manifest = Manifest(foreign.step, {name: file_entry(file) for name, file in files.items()})
        commit.write_files(hidden, {MANIFEST: manifest.to_json().encode()})
    shape = foreign.shape
    print(
        f"{target}: a {shape.style} decoder of {counted(shape.n_layers, 'layer')}, {shape.d_model} wide, "
        f"{shape.vocab_size} ids, at step {foreign.step}, from {foreign.source['format']}"
    )
    print(f"  optimiser state: {foreign.source.get('optimizer', 'not in the files')}")
    print(f"  tokenizer: {', '.join(tokenizer) or 'none; add one with --tokenizer to generate text'}")


def ours(entry: Entry, parts: list[Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Turn one of their tensors, or Megatron's parts of it, into ours: split, joined, turned, padded."""
    if not all(part.is_floating_point() for part in parts):
        raise CheckpointError(f"{entry.theirs} holds no floating-point numbers")
    pieces = [(part.T if entry.transposed else part).chunk(len(entry.ours)) for part in parts]
    for name, own in zip(entry.ours, zip(*pieces, strict=True), strict=True):
        tensor = torch.cat(own, entry.cut) if entry.cut is not None and len(own) > 1 else own[0]
        if name in EMBEDDINGS:
            used = tensor[: shape.vocab_size]
            tensor = tensor.new_zeros(shape.padded_vocab_size, shape.d_model)
            tensor[: len(used)] = used
        yield name, tensor.float().contiguous()


def named_weights(foreign: Foreign, entries: list[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of our decoder by name; biases that nanoGPT left out are 0."""
    for entry in entries:
        yield from ours(entry, foreign.parts(entry.theirs), foreign.shape)
    for entry, zeros in _left_out(foreign, entries):
        yield from ours(entry, [zeros], foreign.shape)


def _moments(foreign: Foreign, entries: list[Entry]) -> Iterator[tuple[str, Tensor]]:
    assert foreign.moments is not None
    step = torch.tensor(float(foreign.optimizer_step))
    for key in ("exp_avg", "exp_avg_sq"):
        held = [(entry, foreign.moments(entry.theirs, key)) for entry in entries]
        for entry, parts in held + [(entry, [zeros]) for entry, zeros in _left_out(foreign, entries)]:
            for name, tensor in ours(entry, parts, foreign.shape):
                yield f"{name}.{key}", tensor
                if key == "exp_avg":
                    yield f"{name}.step", step.clone()


def _left_out(foreign: Foreign, entries: list[Entry]) -> list[tuple[Entry, Tensor]]:
    """Return the biases that a model of nanoGPT was made without."""
    held = {entry.theirs for entry in entries}
    lacking = [e for e in table(foreign.family, foreign.shape) if e.theirs not in held]
    weights = [foreign.names[entry.theirs.removesuffix("bias") + "weight"] for entry in lacking]
    return [(entry, torch.zeros(shape[0])) for entry, shape in zip(lacking, weights, strict=True)]


def _write_folder(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors as they come, in files of about FILE_BYTES, and no more of them in memory than one's."""
    folder.mkdir()
    batch: dict[str, Tensor] = {}
    number = 0

    def flush() -> None:
        nonlocal number
        number += 1
        write_file(folder / f"shard-{number:05d}.safetensors", batch)
        batch.clear()

    for name, tensor in tensors:
        if batch and sum(held.nbytes for held in batch.values()) + tensor.nbytes > FILE_BYTES:
            flush()
        batch[name] = tensor
    if batch:
        flush()


def _vocabulary(foreign: Foreign, wanted: Wanted) -> tuple[dict[str, bytes], int]:
    """Return the files of tokenizer and chat template, and the id that ends a document."""
    vocab_size = foreign.model.vocab_size
    source = wanted.tokenizer or foreign.tokenizer_folder
    files: dict[str, bytes] = {}
    eod_id = foreign.eod_id
    if source is not None:
        try:
            content = read_tokenizer(source)
            tokenizer = parse_tokenizer(content, str(source))
        except DataError:
            if wanted.tokenizer is not None:
                raise
        else:
            if tokenizer.vocab_size > vocab_size:
                raise InputError(f"{source} has {tokenizer.vocab_size} ids, the model {vocab_size}")
            files = {JSON_NAME if content.lstrip()[:1] == b"{" else MODEL_NAME: content}
            files |= chat_files(source) if source.is_dir() else {}
            eod_id = tokenizer.eod_id if eod_id is None else eod_id
    eod_id = wanted.eod_id if wanted.eod_id is not None else eod_id
    eod_id = vocab_size - 1 if eod_id is None else eod_id
    if not 0 <= eod_id < vocab_size:
        raise InputError(f"--eod-id {eod_id} is not one of the {vocab_size} ids")
    return files, eod_id


def _state(foreign: Foreign, eod_id: int) -> dict[str, Any]:
    shape = foreign.shape
    return {
        "step": foreign.step,
        "tokens": 0,
        "loss": None,
        "datasets": [],
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": shape.padded_vocab_size,
        "eod_id": eod_id,
        "world_size": 1,
        "layout": "1",
        "lineage": [{"imported": foreign.source, "step": foreign.step}],
        "versions": {"shoal": importlib.metadata.version("shoal"), "torch": torch.__version__},
    }
