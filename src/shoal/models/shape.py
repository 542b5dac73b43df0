"""The resolved shape of a decoder: every derived number is worked out once, here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.config.rules import divisors_near
from shoal.config.sections import Model
from shoal.errors import ConfigError

_LLAMA_FF_MULTIPLE = (
    128  # the MLP width 8/3 d_model is rounded up to this, so that it divides by 2, 4, 8 ranks
)


@dataclass(frozen=True)
class ModelShape:
    """All that determines the tensors and the function of a decoder; no field is left to be derived."""

    style: Literal["gpt2", "llama"]
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    max_seq_len: int
    vocab_size: int
    padded_vocab_size: int
    tie_embeddings: bool
    norm_eps: float
    rope_theta: float
    dropout: float
    attention_dropout: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads


def resolve_shape(model: Model, vocab_size: int) -> ModelShape:
    """Resolve what `model` leaves to be derived; `vocab_size` is the dataset's or the checkpoint's.

    A ConfigError refuses a model.vocab_size too small for it, and heads that do not divide.
    """
    _check_heads(model)
    if 0 < model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {model.vocab_size} is smaller than the data's vocabulary of {vocab_size}",
            hint="leave model.vocab_size at 0 to take the data's",
        )
    true_vocab_size = model.vocab_size or vocab_size
    tie = model.tie_embeddings if model.tie_embeddings is not None else model.style == "gpt2"
    return ModelShape(
        style=model.style,
        n_layers=model.n_layers,
        d_model=model.d_model,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads or model.n_heads,
        d_ff=model.d_ff or _default_d_ff(model),
        max_seq_len=model.max_seq_len,
        vocab_size=true_vocab_size,
        padded_vocab_size=_round_up(true_vocab_size, model.pad_vocab_multiple),
        tie_embeddings=tie,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
    )


def _check_heads(model: Model) -> None:
    if model.d_model % model.n_heads:
        raise ConfigError(
            f"model.d_model = {model.d_model} is not divisible by model.n_heads = {model.n_heads}",
            hint=f"use model.n_heads = {divisors_near(model.n_heads, model.d_model)}",
        )
    if model.style == "llama" and (model.d_model // model.n_heads) % 2:
        raise ConfigError(
            f"model.d_model / model.n_heads = {model.d_model // model.n_heads} is odd: RoPE turns pairs",
            hint="choose n_heads so that d_model / n_heads is even",
        )
    if model.style == "gpt2" and model.n_kv_heads not in (0, model.n_heads):
        raise ConfigError(
            f"model.n_kv_heads = {model.n_kv_heads}: grouped-query attention belongs to model.style = llama",
            hint="use model.n_kv_heads = 0, or model.style = llama",
        )
    if model.n_kv_heads and model.n_heads % model.n_kv_heads:
        raise ConfigError(
            f"model.n_heads = {model.n_heads} is not divisible by model.n_kv_heads = {model.n_kv_heads}",
            hint=f"use model.n_kv_heads = {divisors_near(model.n_kv_heads, model.n_heads)}",
        )


def _default_d_ff(model: Model) -> int:
    if model.style == "gpt2":
        return 4 * model.d_model
    return _round_up(-(-8 * model.d_model // 3), _LLAMA_FF_MULTIPLE)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
