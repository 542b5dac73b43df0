"""A small dataset for comparing layouts, where the user gives none: ids that walk by small steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.config.sections import Config
from shoal.data.dataset import FORMAT, FORMAT_VERSION, MANIFEST, seal
from shoal.data.indexed import IndexedWriter, token_dtype
from shoal.runtime.files import write_json

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
    folder.mkdir(parents=True)
    dtype = token_dtype(vocab_size)
    facts = {}
    for name, tokens in wanted.items():
        count = max(train.seq_len + 1, min(tokens, _MAX_TOKENS))
        walk = np.cumsum(rng.integers(-2, 3, count)) % (vocab_size - 1)
        with IndexedWriter(folder / name, dtype) as writer:
            for document in np.array_split(walk, max(1, 2 * count // train.seq_len)):
                writer.append(np.append(document, vocab_size - 1).astype(dtype))
                writer.end_document()
            facts[name] = writer.finish()
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "eod_id": vocab_size - 1,
        "tokenizer": {"file": None, "xxh3": ""},
        "splits": facts,
    }
    write_json(folder / MANIFEST, seal(manifest))
    return folder
