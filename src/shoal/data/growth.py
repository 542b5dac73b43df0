"""How much a stranger's tokenizer.json may make of a text: refused before any text is given to it."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator
from typing import Any

from shoal.errors import DataError

_MAX_GROWTH = 256.0  # characters made of one, by rules that replace text; ALBERT's may make 108
_MAX_FORM = 64.0  # bytes of a text in SentencePiece's table, where there is one; Unicode's longest has 33
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
        rules = list(_rules(spec.get(part)))
        replaced = math.prod(map(_replaced, rules))
        tables = [_MAX_FORM for rule in rules if rule.get("type") == "Precompiled"]
        replaced *= math.prod(tables) if len(tables) > 1 else 1.0
        forms = math.prod(_UNICODE.get(str(rule.get("type")), 1.0) for rule in rules)
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


def _rules(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a rule, and those that it is made of."""
    waiting = [part]
    while waiting:
        rule = waiting.pop()
        if isinstance(rule, dict):
            yield rule
            waiting += [inner for name in _LISTS for inner in _list(rule.get(name))]


def _replaced(rule: dict[str, Any]) -> float:
    """Return how many characters a rule makes of one at most, but for Unicode's forms."""
    kind = rule.get("type")
    if kind == "Replace":
        pattern = rule.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        content = len(str(rule.get("content", "")))
        # An expression may match the empty text between characters.
        return max(1.0, content / len(text)) if isinstance(text, str) and text else 1.0 + content
    if kind == "Prepend":
        return 1.0 + len(str(rule.get("prepend", ""))) / _MAX_ADDED * _MAX_GROWTH
    if kind == "Precompiled":
        return _of_charsmap(rule.get("precompiled_charsmap"))
    if kind == "ByteLevel" or "" in (rule.get("suffix"), rule.get("word_delimiter_token")):
        return 2.0  # a character for each byte; a blank beside each character
    return 1.0


def _of_charsmap(content: Any) -> float:
    """Return the growth of SentencePiece's table: a trie, then texts that each end with a zero byte."""
    try:
        table = base64.b64decode(content)
    except (TypeError, ValueError, binascii.Error):
        return 1.0  # the library says what is wrong with it
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    longest = max(map(len, texts))
    return 1.0 if longest <= _MAX_FORM else float(longest)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse_long(what: str, text: Any, most: int, where: str) -> None:
    if isinstance(text, str) and len(text) > most:
        raise DataError(f"tokenizer {where}: {what} has {len(text):,} characters; allowed are {most:,}")
