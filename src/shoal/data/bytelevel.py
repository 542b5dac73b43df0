"""Facts about byte-level BPE: its alphabet, whether texts may be cut, when tiktoken gives the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.data.boundaries import AFTER_WORD, BEFORE_SPACE, Boundary

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD_RULES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-2's own, and the two that Llama 3, Qwen and their kin share. In all of them no match holds a letter or
# digit followed by white space or by a punctuation mark, and none looks behind: a cut there changes no match.
CUTTABLE_PATTERNS = frozenset({GPT2_PATTERN, _WORD_RULES % r"\p{N}{1,3}", _WORD_RULES % r"\p{N}"})


def _alphabet() -> dict[str, int]:
    """Map the 256 visible characters that stand for bytes in vocab files to those bytes (GPT-2, 2019)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF = _alphabet()
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}


def to_bytes(token: str) -> bytes:
    """Turn a token of a vocab file into the bytes it stands for; KeyError where it is not byte-level."""
    return bytes(BYTE_OF[char] for char in token)


def to_chars(token: bytes) -> str:
    """Turn bytes into the spelling of a vocab file."""
    return "".join(CHAR_OF[byte] for byte in token)


def reduce_below(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """Merge `token`'s bytes, lowest rank and leftmost first, with the merges of rank below `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        found = [ranks.get(parts[i] + parts[i + 1], limit) for i in range(len(parts) - 1)]
        lowest = min(found)
        if lowest >= limit:
            break
        at = found.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def tiktoken_ranks(merges: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int] | None:
    """Return ranks with which tiktoken's core merges exactly as the list of pairs does, or None.

    tiktoken merges any two neighbours whose union is a token, the list only its own pairs. They agree on
    every text if each token, reduced with the merges before its own, becomes exactly its own pair: were
    another pair (x, y) of the same token ever to stand side by side, the merges made so far inside x + y
    would be those of reducing the token alone, so the reduction would have ended in (x, y) instead.
    """
    ranks = {bytes([byte]): byte for byte in range(256)}
    for number, pair in enumerate(merges, start=256):
        token = pair[0] + pair[1]
        if token in ranks or reduce_below(token, ranks, number) != list(pair):
            return None
        ranks[token] = number
    return ranks


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Recover the list of pairs from tiktoken's ranks; ValueError where a token has no pair."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = reduce_below(token, ranks, rank)
            if len(parts) != 2:
                raise ValueError(f"token {token!r} does not come from two others")
            merges.append((parts[0], parts[1]))
    return merges


def boundary_rule(spec: dict[str, Any]) -> Boundary | None:
    """Return where a text may be cut without changing ids under this `tokenizer.json`; None where unknown."""
    stages = _stages(spec.get("pre_tokenizer"))
    if spec.get("normalizer") is not None or not stages or _visible_added(spec):
        return None
    if is_gpt2_split(stages):
        return AFTER_WORD
    kinds = [stage.get("type") for stage in stages]
    if kinds in (["WhitespaceSplit"], ["Whitespace"]):
        return BEFORE_SPACE
    if (
        kinds != ["Split", "ByteLevel"]
        or stages[1].get("add_prefix_space")
        or stages[1].get("use_regex", True)
    ):
        return None
    split, pattern = stages[0], stages[0].get("pattern") or {}
    plain = split.get("behavior") == "Isolated" and not split.get("invert")
    return AFTER_WORD if plain and pattern.get("Regex") in CUTTABLE_PATTERNS else None


def is_gpt2_split(stages: list[dict[str, Any]]) -> bool:
    """Tell whether words are split by GPT-2's pattern and nothing else."""
    if [stage.get("type") for stage in stages] != ["ByteLevel"]:
        return False
    return not stages[0].get("add_prefix_space") and bool(stages[0].get("use_regex", True))


def byte_level_merges(spec: dict[str, Any]) -> list[tuple[bytes, bytes]] | None:
    """Return the merges of a plain GPT-2-style BPE in this `tokenizer.json`; None for anything else."""
    model = spec.get("model") or {}
    plain = (
        model.get("type") == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not model.get("byte_fallback")
        and not model.get("ignore_merges")  # a word that is a token stays whole, however it is merged
        and spec.get("normalizer") is None
        and is_gpt2_split(_stages(spec.get("pre_tokenizer")))
        and not _visible_added(spec)
        and all(char in model.get("vocab", {}) for char in BYTE_OF)
    )
    if not plain:
        return None
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model.get("merges", [])]
    try:
        return [(to_bytes(left), to_bytes(right)) for left, right in pairs]
    except (KeyError, ValueError):
        return None


def _stages(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """List the pre-tokenizer's stages in order."""
    if pre_tokenizer is None:
        return []
    if pre_tokenizer.get("type") == "Sequence":
        return list(pre_tokenizer.get("pretokenizers", []))
    return [pre_tokenizer]


def _visible_added(spec: dict[str, Any]) -> bool:
    """Tell whether some added token is found in plain text (a special one is not: its text stays text)."""
    return any(not token.get("special") for token in spec.get("added_tokens") or [])
