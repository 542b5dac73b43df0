"""Whether two tokenizers give the same ids: compared by what decides them, not by how a file spells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from shoal.data.bytelevel import byte_level_merges
from shoal.data.tokenizer import JSON_NAME, MODEL_NAME, read_tokenizer
from shoal.errors import DataError
from shoal.runtime.log import log

# Parts of a tokenizer.json that do not decide the ids of plain text.
_NO_MATTER = {"version", "truncation", "padding", "post_processor", "decoder"}


def tokenizer_digest(content: bytes) -> str:
    """Return the xxh3-128 of what decides ids in a tokenizer.json; of all bytes of any other file."""
    try:
        spec = json.loads(content)
        content = json.dumps(_what_decides(spec), sort_keys=True).encode()
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        pass  # SentencePiece, or nothing that the tokenizers library would read
    return xxhash.xxh3_128_hexdigest(content)


def refuse_other_tokenizer(first: Path | None, second: Path | None, *, allow: bool) -> None:
    """Raise a DataError where two tokenizers give other ids; with `allow`, warn.

    Each is the tokenizer's file or the folder that holds it; where one alone has none, warn.
    """
    held = [path for path in (first, second) if path is not None and _holds(path)]
    contents = [read_tokenizer(path) for path in held]
    if len(held) == 1:
        other = (second if held[0] == first else first) or "the other dataset"
        log.warning(
            f"warning: {other} has no tokenizer to compare with {held[0]}: its ids may stand for other text"
        )
    if len(contents) < 2 or contents[0] == contents[1]:
        return
    ours, theirs = map(tokenizer_digest, contents)
    if ours == theirs:
        return
    message = (
        f"{second} is another tokenizer than {first}, so the same ids stand for other text: "
        f"their digests are {theirs} and {ours}"
    )
    if not allow:
        hint = f"prepare the data with --tokenizer {first}; --allow-tokenizer-mismatch makes this a warning"
        raise DataError(message, hint=hint)
    log.warning(f"warning: {message}")


def _holds(path: Path) -> bool:
    return path.is_file() or any((path / n).is_file() for n in (JSON_NAME, MODEL_NAME, "vocab.json"))


def _what_decides(spec: dict[str, Any]) -> Any:
    """Return plain values that are equal where two tokenizer.json files give the same ids."""
    model, added = spec["model"], spec.get("added_tokens") or []
    merges = byte_level_merges(spec)
    if merges is not None:  # whoever wrote it
        ids = model["vocab"] | {token["content"]: token["id"] for token in added}
        return [ids, [[left.hex(), right.hex()] for left, right in merges]]
    rule = {name: part for name, part in spec.items() if name not in _NO_MATTER and part is not None}
    rule["pre_tokenizer"] = _without_offsets(spec.get("pre_tokenizer"))
    # The text of a special token is only text here, so the rules by which it would be found do not matter.
    added = sorted(added, key=lambda token: token["id"])
    rule["added_tokens"] = [[t["id"], t["content"]] if t.get("special") else t for t in added]
    rule["model"] = {name: part for name, part in model.items() if name != "dropout" and not _unset(part)}
    if "merges" in model:
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        rule["model"]["merges"] = list(pairs)
    return rule


def _without_offsets(part: Any) -> Any:
    """Return a pre-tokenizer without what decides offsets alone."""
    if isinstance(part, list):
        return [_without_offsets(one) for one in part]
    if isinstance(part, dict):
        return {name: _without_offsets(one) for name, one in part.items() if name != "trim_offsets"}
    return part


def _unset(value: object) -> bool:
    return value is None or value is False or value == ""
