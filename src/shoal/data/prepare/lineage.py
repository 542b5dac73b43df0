"""What a dataset was made from and how: compared before work starts, written into its manifest at the end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from shoal.data.dataset import FORMAT, FORMAT_VERSION
from shoal.data.indexed import token_dtype
from shoal.data.prepare.options import BYTES, FROM_TEXT, GPT2, PrepareOptions
from shoal.data.prepare.sources import SourceFile
from shoal.data.prepare.splits import SplitPlan
from shoal.data.tokenizer import Tokenizer
from shoal.runtime.files import hash_file

PIPELINE_VERSION = 1  # raise it when the same input would give other bytes


def describe_inputs(options: PrepareOptions, sources: list[SourceFile]) -> dict[str, Any]:
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
    return described


def plan_key(inputs: dict[str, Any]) -> str:
    """Return a short name for a set of inputs and options."""
    return xxhash.xxh3_64(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Say in words what differs."""
    words = []
    for name, value in new.items():
        before = old.get(name)
        if before == value:
            continue
        if name.endswith("_files") and before:
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
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the manifest and the record of each stage. Neither holds a time: same input, same bytes."""
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
                {"path": _shown(s.path), "role": s.role, "bytes": s.size, "documents": documents_of[number]}
                for number, s in enumerate(sources)
            ],
        },
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


def _shown(path: str) -> str:
    """Return a path as text, though a file's name need not be UTF-8."""
    return path.encode(errors="surrogateescape").decode(errors="replace")


def _counters(summaries: list[dict[str, Any]]) -> dict[str, int]:
    """Add the ranges up: read = kept + rejected + empty + filtered + duplicates."""
    total = {name: sum(s[name] for s in summaries) for name in ("documents", "rejected", "empty", "tokens")}
    return {
        "documents_read": total["documents"] + total["rejected"] + total["empty"],
        "rejected": total["rejected"],
        "empty": total["empty"],
        "filtered": 0,
        "duplicates": 0,
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
