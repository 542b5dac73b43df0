from __future__ import annotations

import re

import pytest

from shoal.config.sections import Model
from shoal.errors import ConfigError
from shoal.models.shape import resolve_shape


def test_derived_values_follow_the_style():
    gpt2 = resolve_shape(Model(style="gpt2", d_model=768, n_heads=12), 50257)
    assert (gpt2.d_ff, gpt2.n_kv_heads, gpt2.tie_embeddings, gpt2.padded_vocab_size) == (
        3072,
        12,
        True,
        50304,
    )
    llama = resolve_shape(Model(style="llama", d_model=768, n_heads=12, n_kv_heads=4), 256)
    assert (llama.d_ff, llama.n_kv_heads, llama.tie_embeddings, llama.padded_vocab_size) == (
        2048,
        4,
        False,
        256,
    )


def test_a_vocabulary_smaller_than_the_data_is_refused():
    with pytest.raises(
        ConfigError, match=r"model.vocab_size = 10 is smaller than the data's vocabulary of 11"
    ):
        resolve_shape(Model(vocab_size=10), 11)
    assert resolve_shape(Model(vocab_size=12), 11).vocab_size == 12


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"d_model": 32, "n_heads": 5}, "model.d_model = 32 is not divisible by model.n_heads = 5"),
        ({"style": "llama", "d_model": 30, "n_heads": 10}, "= 3 is odd: RoPE turns pairs"),
        ({"n_heads": 12, "n_kv_heads": 4}, "grouped-query attention belongs to model.style = llama"),
        ({"style": "llama", "n_heads": 12, "n_kv_heads": 5}, "is not divisible by model.n_kv_heads = 5"),
    ],
)
def test_heads_that_do_not_divide_are_refused(settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolve_shape(Model(**settings), 100)
