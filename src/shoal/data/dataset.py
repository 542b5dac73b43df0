"""A dataset folder: token files for each split, the tokenizer, and a manifest that says what they must be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shoal.data.indexed import IndexedReader
from shoal.data.tokenizer import MAX_VOCAB
from shoal.errors import DataError, InputError
from shoal.runtime.files import digest_of, hash_file, read_json, reading

MANIFEST = "manifest.json"
PAGES_DIR = "pages"  # of fetched pages, beside the manifest
FORMAT = "shoal-dataset"
FORMAT_VERSION = 1
EXAMPLES_FORMAT = "shoal-examples"
_CONTENTS = {FORMAT: "tokens", EXAMPLES_FORMAT: "labelled examples"}
SPLITS = ("train", "validation", "test")
_REMAKE = "prepare it again with `shoal prepare`, or copy it again from where it came"


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of one split, end to end, and how many documents they hold."""

    name: str
    tokens: np.ndarray  # 1-D, read-only, memory-mapped
    num_documents: int
    path: Path
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, end-of-document tokens included."""
        return len(self.tokens)

    def check_ids(self, ids: np.ndarray, first: int) -> None:
        """Raise a DataError where `ids`, which begin at token `first`, are not all in the vocabulary."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
            raise DataError(
                f"{self.path} holds id {ids[at]} at position {first + at:,}; the vocabulary has "
                f"{self.vocab_size:,} ids: damaged",
                hint=_REMAKE,
            )


@dataclass(frozen=True)
class Dataset:
    """An opened dataset folder; `fingerprint` changes with everything that would change a batch."""

    path: Path
    fingerprint: str
    vocab_size: int
    eod_id: int
    tokenizer_path: Path | None
    manifest: dict[str, Any]
    splits: dict[str, TokenSplit]
    digests: dict[Path, str]  # of all files, as they were written

    def split(self, name: str) -> TokenSplit | None:
        """Return a split, or None where the dataset was prepared without it."""
        return self.splits.get(name)


def fingerprint(manifest: dict[str, Any]) -> str:
    """Hash what decides a batch: token files, dtype, vocabulary, tokenizer; not paths."""
    parts = [manifest["dtype"], manifest["vocab_size"], manifest["eod_id"], manifest["tokenizer"]["xxh3"]]
    for name in SPLITS:
        if name in manifest["splits"]:
            facts = manifest["splits"][name]
            parts += [name, facts["bin_xxh3"], facts["idx_xxh3"]]
    return xxhash.xxh3_128("\n".join(map(str, parts)).encode()).hexdigest()


def open_dataset(path: Path) -> Dataset:
    """Open a dataset folder, checking sizes, dtype, header and tokenizer against its manifest."""
    path = Path(path)
    manifest = read_manifest(path, FORMAT, FORMAT_VERSION)
    try:
        if not isinstance(manifest["splits"], dict) or not manifest["splits"].keys() & set(SPLITS):
            raise ValueError("splits")
        splits = {name: _open_split(path, name, manifest) for name in SPLITS if name in manifest["splits"]}
        tokenizer = _tokenizer_path(path, manifest["tokenizer"]["file"])
        vocab_size, eod_id = int(manifest["vocab_size"]), int(manifest["eod_id"])
        if not 0 < vocab_size <= MAX_VOCAB:
            raise ValueError("vocab_size")
        digest = fingerprint(manifest)
        digests = {
            path / f"{name}.{kind}": str(manifest["splits"][name][f"{kind}_xxh3"])
            for name in splits
            for kind in ("bin", "idx")
        }
        if tokenizer is not None:
            check_digest(tokenizer, manifest["tokenizer"]["xxh3"])  # small, and gives all ids their meaning
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"the manifest of dataset {path} has a missing or invalid entry: {error}", hint=_REMAKE
        ) from error
    return Dataset(path, digest, vocab_size, eod_id, tokenizer, manifest, splits, digests)


def verify_dataset(path: Path) -> Dataset:
    """Open a dataset and read every byte again: hashes, index against tokens, ids against vocabulary."""
    dataset = open_dataset(path)
    for file, digest in dataset.digests.items():
        check_digest(file, digest)
    for name, split in dataset.splits.items():
        IndexedReader(dataset.path / name).check()
        split.check_ids(split.tokens, 0)
    return dataset


def read_manifest(path: Path, format: str, version: int) -> dict[str, Any]:
    """Read the manifest of a dataset folder and check that it is of a format that we write."""
    with reading(path):
        is_dir, is_finished = path.is_dir(), (path / MANIFEST).is_file()
    if not is_dir:
        raise DataError(
            f"there is no dataset folder {path}", hint=f"make one: shoal prepare TEXT --output {path}"
        )
    if not is_finished:
        raise DataError(
            f"{path} is not a finished dataset: it has no {MANIFEST}",
            hint="run the `shoal prepare` command that writes it again; it continues where it stopped",
        )
    try:
        manifest = read_json(path / MANIFEST, "dataset manifest")
    except InputError as error:
        raise DataError(error.message, hint=_REMAKE) from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != format and (held := _CONTENTS.get(str(found))):
        raise DataError(
            f"dataset {path} holds {held}, and this run takes {_CONTENTS[format]}",
            hint="give another --data, or another model.network",
        )
    if not isinstance(manifest, dict) or found != format:
        raise DataError(f"{path / MANIFEST} is not a Shoal dataset manifest", hint=_REMAKE)
    if manifest.get("version") != version:
        raise DataError(
            f"dataset {path} has format version {manifest.get('version')}; this Shoal reads {version}",
            hint=_REMAKE,
        )
    # Manifests of earlier versions have no digest of their own.
    if "digest" in manifest and manifest.pop("digest") != digest_of(manifest):
        raise DataError(f"{path / MANIFEST} was damaged or edited: its digest does not fit", hint=_REMAKE)
    return manifest


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with its own digest, which makes damage to the manifest visible, too."""
    facts = {name: value for name, value in manifest.items() if name != "digest"}
    return {**facts, "digest": digest_of(facts)}


def _open_split(path: Path, name: str, manifest: dict[str, Any]) -> TokenSplit:
    """Open one split and compare it with the manifest."""
    facts = manifest["splits"][name]
    reader = IndexedReader(path / name)
    found = {
        "dtype": reader.dtype.name,
        "tokens": len(reader.tokens),
        "documents": reader.num_documents,
        "idx_bytes": reader.idx_path.stat().st_size,
    }
    for key, value in found.items():
        expected = manifest["dtype"] if key == "dtype" else facts[key]
        if value != expected:
            raise DataError(
                f"{path / name}: {key} is {value}, the manifest says {expected}: damaged", hint=_REMAKE
            )
    vocab_size = int(manifest["vocab_size"])
    return TokenSplit(name, reader.tokens, reader.num_documents, reader.bin_path, vocab_size)


def _tokenizer_path(path: Path, file: str | None) -> Path | None:
    """Return where the tokenizer lies; a manifest from a stranger may not point outside its folder."""
    if file is None:
        return None
    if Path(file).name != file or not (path / file).is_file():
        raise DataError(f"dataset {path} has no tokenizer file {file!r}", hint=_REMAKE)
    return path / file


def check_digest(path: Path, expected: str) -> None:
    """Read a file and raise a DataError where its digest is not the one in the manifest."""
    with reading(path):
        found = hash_file(path)
    if found != expected:
        raise DataError(
            f"{path} changed since it was prepared: hash {found}, expected {expected}", hint=_REMAKE
        )
