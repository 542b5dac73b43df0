"""How much a tokenizer's rules may make of a text: each rule at its worst, a chain multiplied."""

import json

import pytest

from shoal.data.growth import refuse_growth
from shoal.data.tokenizer import bytes_tokenizer_json
from shoal.errors import DataError


def replace(times):
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * times}


def chain(*rules):
    return {"type": "Sequence", "normalizers": list(rules)}


@pytest.mark.parametrize(
    ("rule", "growth"),
    [
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
