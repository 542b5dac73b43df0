"""A dataset folder made in a moment, without the preparation engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from shoal.data.dataset import MANIFEST, seal
from shoal.data.synthetic import write_documents
from shoal.data.tokenizer import bytes_tokenizer_json
from shoal.runtime.files import hash_file, write_json

VOCAB_SIZE = 257  # bytes and an end-of-document id
EOD_ID = 256


def write_dataset(
    folder: Path, splits: dict[str, list[np.ndarray]], vocab_size: int = VOCAB_SIZE, eod_id: int = EOD_ID
) -> Path:
    """Write documents of ids as a dataset whose tokenizer knows bytes."""
    return write_documents(folder, splits, vocab_size, eod_id, bytes_tokenizer_json())


def with_other_tokenizer(folder: Path) -> Path:
    """Give a dataset another tokenizer of the same size: two bytes change places."""
    spec = json.loads(bytes_tokenizer_json())
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["tokenizer"]["xxh3"] = hash_file(folder / "tokenizer.json")
    write_json(folder / MANIFEST, seal(manifest))
    return folder


def random_dataset(folder: Path, *, train_tokens: int = 20_000, seed: int = 0) -> Path:
    """Write a dataset with some structure to learn: ids walk up and down by small steps."""
    rng = np.random.default_rng(seed)

    def documents(total: int) -> list[np.ndarray]:
        walk = (np.cumsum(rng.integers(-2, 3, total)) + 128) % 256
        return np.array_split(walk, max(1, total // 500))

    return write_dataset(
        folder,
        {"train": documents(train_tokens), "validation": documents(3000), "test": documents(3000)},
    )
