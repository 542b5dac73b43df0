"""How much a tokenizer's rules may make of a text: each rule at its worst, a chain multiplied."""

import base64
import json

import pytest

from shoal.data.growth import refuse_growth
from shoal.data.tokenizer import bytes_tokenizer_json
from shoal.errors import DataError


def replace(times):
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * times}


def chain(*rules):
    return {"type": "Sequence", "normalizers": list(rules)}


def charsmap(length):
    """Return SentencePiece's table: the size of a trie, the trie, then texts."""
    table = (300).to_bytes(4, "little") + b"t" * 300 + b"b" * length + b"\0cc\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


@pytest.mark.parametrize(
    ("rule", "growth"),
    [
        (charsmap(256), None),
        (charsmap(257), "257"),
        (charsmap(60), None),
        (chain(charsmap(60), charsmap(2)), "4.1e[+]03"),
        (chain(*[charsmap(60)] * 500), "inf"),
        (replace(256), None),
        (replace(257), "257"),
        (chain(replace(16), replace(16)), None),
        (chain(replace(16), replace(17)), "272"),
        (chain({"type": "NFKC"}, replace(14)), None),  # 18 by Unicode's forms
        (chain({"type": "NFKC"}, replace(15)), "270"),
        (chain({"type": "NFKC"}, {"type": "NFKD"}), None),  # forms of forms do not grow again
    ],
)
@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_rule_that_makes_more_than_256_characters_of_one_is_refused(part, rule, growth):
    spec = json.loads(bytes_tokenizer_json()) | {part: rule}
    if growth is None:
        refuse_growth(spec, "here")
    else:
        with pytest.raises(DataError, match=f"tokenizer here: its {part} makes {growth} characters of one"):
            refuse_growth(spec, "here")


@pytest.mark.parametrize(
    ("part", "inner", "rule"),
    [
        ("pre_tokenizer", "pretokenizers", {"type": "ByteLevel"}),
        ("normalizer", "normalizers", {"type": "ByteLevel"}),
        ("decoder", "decoders", {"type": "BPEDecoder", "suffix": ""}),
        ("decoder", "decoders", {"type": "CTC", "word_delimiter_token": ""}),
    ],
)
def test_rules_that_double_a_text_may_not_be_chained(part, inner, rule):
    refuse_growth({part: rule, "model": {}}, "once")
    with pytest.raises(DataError, match=f"its {part} makes"):
        refuse_growth({part: {"type": "Sequence", inner: [rule] * 24}, "model": {}}, "chained")
