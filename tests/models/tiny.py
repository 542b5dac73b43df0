"""Tiny decoders, and tokens for them."""

from __future__ import annotations

import pytest
import torch

from shoal.config.sections import Model
from shoal.models.shape import resolve_shape

TINY = {"n_layers": 2, "d_model": 32, "n_heads": 4, "max_seq_len": 16}
STYLES = pytest.mark.parametrize("style", ["gpt2", "llama"])


def tiny_shape(style: str, vocab_size: int = 50, **settings):
    return resolve_shape(Model(style=style, **TINY | settings), vocab_size)


def tokens(batch: int = 3, time: int = 16, vocab_size: int = 50, seed: int = 1):
    return torch.randint(0, vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))
