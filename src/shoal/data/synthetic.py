"""A small dataset for comparing layouts, where the user gives none: ids that walk by small steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.config.sections import Config
from shoal.data.dataset import FORMAT, FORMAT_VERSION, MANIFEST, seal
from shoal.data.indexed import IndexedWriter, token_dtype
from shoal.data.tokenizer import JSON_NAME
from shoal.runtime.files import hash_file, write_json, write_text

_VOCAB_SIZE = 257  # bytes and an end-of-document id
_MAX_TOKENS = 1 << 20


def write_dataset(folder: Path, config: Config, steps: int) -> Path:
    """Write as many tokens as some steps need, in documents of about half a sequence."""
    train = config.train
    vocab_size = min(_VOCAB_SIZE, config.model.vocab_size or _VOCAB_SIZE)
    wanted = {
        "train": train.global_batch_size * train.seq_len * steps + 1,
        "validation": config.eval.sequences * (config.eval.seq_len or train.seq_len) + 1,
    }
    rng = np.random.default_rng(train.seed)
    splits = {}
    for name, tokens in wanted.items():
        count = max(train.seq_len + 1, min(tokens, _MAX_TOKENS))
        walk = np.cumsum(rng.integers(-2, 3, count)) % (vocab_size - 1)
        splits[name] = np.array_split(walk, max(1, 2 * count // train.seq_len))
    return write_documents(folder, splits, vocab_size, vocab_size - 1)


def write_documents(
    folder: Path,
    splits: Mapping[str, Sequence[NDArray[Any]]],
    vocab_size: int,
    eod_id: int,
    tokenizer: str | None = None,
) -> Path:
    """Write documents of ids as a dataset, each ended by `eod_id`; `tokenizer` is a tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = token_dtype(vocab_size)
    facts = {}
    for name, documents in splits.items():
        with IndexedWriter(folder / name, dtype) as writer:
            for document in documents:
                writer.append(np.append(document, eod_id).astype(dtype))
                writer.end_document()
            facts[name] = writer.finish()
    about = {"file": None, "xxh3": ""}
    if tokenizer is not None:
        write_text(folder / JSON_NAME, tokenizer)
        about = {"file": JSON_NAME, "xxh3": hash_file(folder / JSON_NAME)}
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "eod_id": eod_id,
        "tokenizer": about,
        "splits": facts,
    }
    write_json(folder / MANIFEST, seal(manifest))
    return folder
