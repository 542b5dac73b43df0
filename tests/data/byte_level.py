"""Byte-level BPE tokenizers built by the tokenizers library, for a pattern of words."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from shoal.data.bytelevel import GPT2_PATTERN


def byte_level(bpe: models.BPE, pattern: str = GPT2_PATTERN) -> Tokenizer:
    """Return a tokenizer that cuts a text by `pattern` and applies `bpe` to the bytes of each word."""
    built = Tokenizer(bpe)
    if pattern == GPT2_PATTERN:
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    built.decoder = decoders.ByteLevel()
    return built
