"""What a dataset was made from and how: compared before work starts, written into its manifest at the end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from shoal.data.dataset import FORMAT, FORMAT_VERSION, MANIFEST
from shoal.data.indexed import token_dtype
from shoal.data.prepare.chain import Chain
from shoal.data.prepare.options import BYTES, FROM_TEXT, GPT2, PrepareOptions
from shoal.data.prepare.sources import SourceFile
from shoal.data.prepare.splits import SplitPlan
from shoal.data.tokenizer import Tokenizer
from shoal.errors import InputError
from shoal.runtime.files import hash_file

PIPELINE_VERSION = 1  # raise it when the same input would give other bytes


def describe_inputs(
    options: PrepareOptions, sources: list[SourceFile], chain: Chain | None = None
) -> dict[str, Any]:
    """Return everything that decides the result: options by name, and each role's files by digest."""
    names = ("split", "seed", "text_key", "delim", "separator", "limit")
    described: dict[str, Any] = {"pipeline": PIPELINE_VERSION, "tokenizer": _tokenizer_identity(options)}
    described |= {name: getattr(options, name) for name in names}
    for role in ("main", "validation", "test"):
        files = [source for source in sources if source.role == role]
        digest = xxhash.xxh3_128()
        for source in files:
            digest.update(json.dumps([source.path, source.kind, source.size, source.mtime_ns]).encode())
        described[f"{role}_files"] = {
            "files": len(files),
            "bytes": sum(source.size for source in files),
            "digest": digest.hexdigest(),
        }
    described["shuffle"] = options.shuffle or None
    described["stages"] = chain.to_dict() if chain else None
    described["stage_files"] = {file: _digest(Path(file)) for file in chain.files()} if chain else None
    described["urls"] = {url: _digest(Path(url)) for url in options.urls} or None
    return {name: value for name, value in described.items() if value is not None or name in names}


def _digest(path: Path) -> str:
    """Return a digest of a file, of a dataset's manifest, or of a folder's files by name, size and time."""
    try:
        if path.is_dir() and (path / MANIFEST).is_file():
            return hash_file(path / MANIFEST)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())
        return hash_file(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint="check its name") from error


def plan_key(inputs: dict[str, Any]) -> str:
    """Return a short name for a set of inputs and options."""
    return xxhash.xxh3_64(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Say in words what differs."""
    words = []
    for name in dict.fromkeys([*new, *old]):
        before, value = old.get(name), new.get(name)
        if before == value:
            continue
        if name.endswith("_files") and name != "stage_files" and before and value:
            words.append(
                f"{name.replace('_', ' ')} were {before['files']:,} with {before['bytes']:,} bytes, "
                f"now {value['files']:,} with {value['bytes']:,}, or were written to since"
            )
        else:
            words.append(f"{name} was {before}, now {value}")
    return words


def build_manifest(
    options: PrepareOptions,
    inputs: dict[str, Any],
    sources: list[SourceFile],
    summaries: list[dict[str, Any]],
    split: SplitPlan,
    facts: dict[str, dict[str, Any]],
    tokenizer: Tokenizer,
    tokenizer_path: Path,
    records: list[dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the manifest and the record of each stage, those of a chain are `records`.

    Neither holds a time: same input, same bytes.
    """
    counters = _counters(summaries)
    assert counters["tokens"] == sum(fact["tokens"] for fact in facts.values()), (counters, facts)
    documents_of = Counter[int]()
    for summary in summaries:
        documents_of.update(dict(summary.get("documents_of", ())))  # absent: begun by an earlier version
    stages: dict[str, dict[str, Any]] = {
        "parse": {
            "stage": "parse",
            "settings": {name: inputs[name] for name in ("text_key", "delim", "separator", "limit")},
            "counters": {
                name: counters[name] for name in ("documents_read", "rejected", "empty", "bytes_read")
            },
            "files": [
                {"path": shown(s.path), "role": s.role, "bytes": s.size, "documents": documents_of[number]}
                for number, s in enumerate(sources)
            ],
        },
        **{record["stage"]: record for record in records},
        "tokenise": {
            "stage": "tokenise",
            "settings": {"tokenizer": inputs["tokenizer"]},
            "counters": {name: counters[name] for name in ("documents_kept", "text_bytes", "tokens")},
        },
        "split": {"stage": "split", "settings": {"split": options.split, **asdict(split)}},
    }
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "made_by": f"shoal {version('shoal')}",
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "max_id": max(fact["max_id"] for fact in facts.values()),
        "eod_id": tokenizer.eod_id,
        "tokenizer": {
            "file": tokenizer_path.name,
            "kind": options.tokenizer if options.tokenizer in (BYTES, GPT2, *FROM_TEXT) else tokenizer.name,
            "xxh3": hash_file(tokenizer_path),
        },
        "splits": facts,
        "split": stages["split"]["settings"],
        "counters": counters,
        "inputs": inputs,
        "lineage": [{k: v for k, v in record.items() if k != "files"} for record in stages.values()],
    }
    return manifest, stages


def shown(path: str) -> str:
    """Return a path as text, though a file's name need not be UTF-8."""
    return path.encode(errors="surrogateescape").decode(errors="replace")


def _counters(summaries: list[dict[str, Any]]) -> dict[str, int]:
    """Add the ranges up: read = kept + rejected + empty + filtered + duplicates."""
    names = ("documents", "rejected", "empty", "filtered", "duplicates", "tokens")
    total = {name: sum(summary.get(name, 0) for summary in summaries) for name in names}
    return {
        "documents_read": sum(total.values()) - total["tokens"],
        "rejected": total["rejected"],
        "empty": total["empty"],
        "filtered": total["filtered"],
        "duplicates": total["duplicates"],
        "documents_kept": total["documents"],
        "tokens": total["tokens"],
        "text_bytes": sum(s["text_bytes"] for s in summaries),
        "bytes_read": sum(s["bytes"] for s in summaries),
    }


def _tokenizer_identity(options: PrepareOptions) -> str:
    """Name the tokenizer so that another one, or a changed file, has another name."""
    if options.tokenizer in FROM_TEXT:
        return f"{options.tokenizer} {options.vocab_size or ''}".strip()
    path = Path(options.tokenizer)
    if options.tokenizer == BYTES or not path.exists():
        return options.tokenizer
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    return f"{options.tokenizer} {' '.join(hash_file(file)[:16] for file in files)}"
