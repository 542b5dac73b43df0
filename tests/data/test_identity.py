"""The same tokenizer, however its file is written, has the same digest; another one has another."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from shoal.data.bytelevel import BYTE_OF
from shoal.data.identity import refuse_other_tokenizer, tokenizer_digest
from shoal.data.tokenizer import byte_level_json, bytes_tokenizer_json
from shoal.errors import DataError


def trained(normalizer=None):
    built = Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        built.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<eos>"], show_progress=False)
    built.train_from_iterator(["the cat sat on the mat that the cat had"] * 9, trainer)
    return json.loads(built.to_str())


def digest(spec):
    return tokenizer_digest(json.dumps(spec).encode())


def test_spelling_does_not_change_the_digest():
    spec = trained()
    turned = json.loads(json.dumps(spec))
    turned["model"]["vocab"] = dict(reversed(turned["model"]["vocab"].items()))
    turned["model"]["merges"] = [" ".join(pair) for pair in turned["model"]["merges"]]
    turned["model"] |= {"byte_fallback": None, "continuing_subword_prefix": "", "dropout": 0.1}
    turned |= {"version": "2", "post_processor": {"type": "ByteLevel"}, "truncation": {"max_length": 9}}
    turned["added_tokens"][0]["lstrip"] = True  # of a special token, whose text is only text
    assert digest(turned) == digest(spec)
    assert tokenizer_digest(json.dumps(spec, indent=4).encode()) == digest(spec)


def test_gpt2s_style_is_the_same_from_any_program():
    vocab = dict(BYTE_OF) | {"th": 256}
    ours = byte_level_json(vocab, [("t", "h")], "<|endoftext|>")
    theirs = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("t", "h")],
            unk_token="<|endoftext|>",
            continuing_subword_prefix="",
            end_of_word_suffix="",
        )
    )
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    theirs.decoder, theirs.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    theirs.add_special_tokens(["<|endoftext|>"])
    assert tokenizer_digest(theirs.to_str(pretty=True).encode()) == tokenizer_digest(ours.encode())


@pytest.mark.parametrize("change", ["ids", "merges", "normalizer", "pre_tokenizer", "unk_id", "added"])
def test_what_decides_ids_changes_the_digest(change):
    spec = trained()
    other = json.loads(json.dumps(spec))
    model = other["model"]
    if change == "ids":
        model["vocab"]["a"], model["vocab"]["c"] = model["vocab"]["c"], model["vocab"]["a"]
    elif change == "merges":
        model["merges"] = model["merges"][::-1]
    elif change == "normalizer":
        other["normalizer"] = json.loads(normalizers.Lowercase().__getstate__())
    elif change == "pre_tokenizer":
        other["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    elif change == "unk_id":
        model["unk_id"] = 0  # not the same as none
    else:
        other["added_tokens"][1]["special"] = False
    assert digest(other) != digest(spec)


def test_bytes_in_another_order_are_another_tokenizer():
    spec = json.loads(bytes_tokenizer_json())
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    assert digest(spec) != tokenizer_digest(bytes_tokenizer_json().encode())


@pytest.mark.parametrize(
    "content", [b"", b"\x0a\x0e<unk>", b"{", b"{}", b"[1]", b'{"model": []}', b"[" * 10**5]
)
def test_any_other_file_counts_byte_by_byte(content):
    assert tokenizer_digest(content) == tokenizer_digest(content)
    assert tokenizer_digest(content) != tokenizer_digest(content + b" ")


def test_offsets_and_the_order_of_added_tokens_decide_no_id():
    spec = trained()
    parts = [{"type": "Split", "pattern": {"String": " "}}, {"type": "ByteLevel", "use_regex": False}]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    other = json.loads(json.dumps(spec))
    other["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = True
    other["added_tokens"].reverse()
    assert digest(other) == digest(spec)
    other["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = True
    assert digest(other) != digest(spec)


def test_where_one_has_none_nothing_is_compared(tmp_path, caplog):
    (tmp_path / "tokenizer.json").write_text(bytes_tokenizer_json())
    (tmp_path / "none").mkdir()
    refuse_other_tokenizer(tmp_path, tmp_path / "none", allow=False)
    assert f"{tmp_path / 'none'} has no tokenizer to compare with {tmp_path}" in caplog.text
    refuse_other_tokenizer(None, tmp_path, allow=False)
    assert "the other dataset has no tokenizer to compare with" in caplog.text
    caplog.clear()
    refuse_other_tokenizer(None, tmp_path / "none", allow=False)
    refuse_other_tokenizer(tmp_path, tmp_path, allow=False)
    assert not caplog.text
    (tmp_path / "none/tokenizer.model").write_bytes(b"of another kind")
    with pytest.raises(DataError, match=r"none is another tokenizer than .*digests are \w{32} and \w{32}"):
        refuse_other_tokenizer(tmp_path, tmp_path / "none", allow=False)
