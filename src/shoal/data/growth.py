"""How much a stranger's tokenizer.json may make of a text: refused before any text is given to it."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from shoal.errors import DataError

_MAX_GROWTH = 256.0  # characters made of one, by rules that replace text; ALBERT's may make 108
_MAX_ADDED = 1 << 10  # characters put before a text, or into a word
_MAX_TOKEN = 1 << 16  # characters of one token: a longer one makes a long text of few ids
_MAX_WORD = 1 << 14  # characters of a word that WordPiece looks through again and again
_LISTS = ("normalizers", "pretokenizers", "decoders")
_UNICODE = {"NFKC": 18.0, "NFKD": 18.0, "NFC": 3.0, "NFD": 4.0, "Lowercase": 3.0, "BertNormalizer": 12.0}


def refuse_growth(spec: dict[str, Any], where: str) -> None:
    """Raise DataError where a tokenizer's rules make a text so large that memory or time could end.

    Each rule is looked at alone, at its worst; a chain multiplies. Unicode's own forms count only in a chain
    that replaces text by longer text: by themselves they do not grow again and again.
    """
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        replaced, forms = _growth(spec.get(part))
        growth = replaced * forms if replaced > 1 else 1.0
        if not growth <= _MAX_GROWTH:
            raise DataError(
                f"tokenizer {where}: its {part} makes {growth:.3g} characters of one; allowed are "
                f"{_MAX_GROWTH:g}",
                hint="a tokenizer that grows text so much would fill the memory; take it from its source",
            )
    model = spec["model"]
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        _refuse_long(f"model.{name}", model.get(name), _MAX_ADDED, where)
    vocab = model.get("vocab")
    tokens = vocab if isinstance(vocab, dict) else [entry[0] for entry in vocab or () if entry]
    _refuse_long("a token", max(map(str, tokens), key=len, default=""), _MAX_TOKEN, where)
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int) and word > _MAX_WORD:
        raise DataError(f"tokenizer {where}: model.max_input_chars_per_word is {word}, above {_MAX_WORD}")


def _growth(rule: Any) -> tuple[float, float]:
    """Return how many characters a rule makes of one, at most: by replacing, and by Unicode's forms."""
    if not isinstance(rule, dict):
        return 1.0, 1.0
    replaced, forms = 1.0, _UNICODE.get(str(rule.get("type")), 1.0)
    if rule.get("type") == "ByteLevel" or "" in (rule.get("suffix"), rule.get("word_delimiter_token")):
        replaced = 2.0  # a character for each byte; a blank beside each character
    for inner in (part for name in _LISTS for part in _list(rule.get(name))):
        more, other = _growth(inner)
        replaced, forms = replaced * more, forms * other
    if rule.get("type") == "Replace":
        pattern = rule.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        content = len(str(rule.get("content", "")))
        # An expression may match the empty text between characters.
        replaced *= max(1.0, content / len(text)) if isinstance(text, str) and text else 1.0 + content
    if rule.get("type") == "Prepend":
        replaced *= 1.0 + len(str(rule.get("prepend", ""))) / _MAX_ADDED * _MAX_GROWTH
    if rule.get("type") == "Precompiled":
        replaced *= _of_charsmap(rule.get("precompiled_charsmap"))
    return replaced, forms


def _of_charsmap(content: Any) -> float:
    """Return the growth of SentencePiece's table: a trie, then texts that each end with a zero byte."""
    try:
        table = base64.b64decode(content)
    except (TypeError, ValueError, binascii.Error):
        return 1.0  # the library says what is wrong with it
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    longest = max(map(len, texts))
    return 1.0 if longest <= 64 else float(longest)  # in bytes: Unicode's longest form has 33


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse_long(what: str, text: Any, most: int, where: str) -> None:
    if isinstance(text, str) and len(text) > most:
        raise DataError(f"tokenizer {where}: {what} has {len(text):,} characters; allowed are {most:,}")
