"""Weights of transformers' models in our decoder: the judge of every numerical claim about it."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.decoder import Decoder
from shoal.models.shape import ModelShape

_GPT2_NAMES = {
    "ln_1": "attention_norm",
    "attn.c_proj": "attention.o",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
_LLAMA_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}


def decoder_from_hf(hf_model, pad_multiple: int = 128) -> Decoder:
    """Return a Decoder that computes what a transformers GPT2LMHeadModel or LlamaForCausalLM computes."""
    gpt2 = hf_model.config.model_type == "gpt2"
    shape = (
        _gpt2_shape(hf_model.config, pad_multiple) if gpt2 else _llama_shape(hf_model.config, pad_multiple)
    )
    weights = (_gpt2_weights if gpt2 else _llama_weights)(hf_model.state_dict(), shape)
    for name in ("embed.weight", "head.weight"):
        rows = weights[name]
        weights[name] = torch.cat((rows, torch.randn(shape.padded_vocab_size - len(rows), shape.d_model)))
    if shape.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"]
    model = Decoder(shape)
    model.load_state_dict(weights)
    return model


def _padded(vocab_size: int, multiple: int) -> int:
    return -(-vocab_size // multiple) * multiple


def _gpt2_shape(config, multiple: int) -> ModelShape:
    return ModelShape(
        style="gpt2",
        n_layers=config.n_layer,
        d_model=config.n_embd,
        n_heads=config.n_head,
        n_kv_heads=config.n_head,
        d_ff=config.n_inner or 4 * config.n_embd,
        max_seq_len=config.n_positions,
        vocab_size=config.vocab_size,
        padded_vocab_size=_padded(config.vocab_size, multiple),
        tie_embeddings=config.tie_word_embeddings,
        norm_eps=config.layer_norm_epsilon,
        rope_theta=10000.0,
        dropout=0.0,
        attention_dropout=0.0,
    )


def _llama_shape(config, multiple: int) -> ModelShape:
    return ModelShape(
        style="llama",
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        d_ff=config.intermediate_size,
        max_seq_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        padded_vocab_size=_padded(config.vocab_size, multiple),
        tie_embeddings=config.tie_word_embeddings,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        dropout=0.0,
        attention_dropout=0.0,
    )


def _gpt2_weights(hf: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Transpose the Conv1D matrices [in, out] and cut c_attn into q, k and v."""
    weights = {
        "embed.weight": hf["transformer.wte.weight"],
        "positions.weight": hf["transformer.wpe.weight"],
        "norm.weight": hf["transformer.ln_f.weight"],
        "norm.bias": hf["transformer.ln_f.bias"],
        "head.weight": hf["lm_head.weight"],
    }
    for layer in range(shape.n_layers):
        for kind in ("weight", "bias"):
            fused = hf[f"transformer.h.{layer}.attn.c_attn.{kind}"]
            for part, piece in zip("qkv", fused.split(shape.d_model, dim=-1), strict=True):
                weights[f"blocks.{layer}.attention.{part}.{kind}"] = piece.T if kind == "weight" else piece
            for theirs, ours in _GPT2_NAMES.items():
                tensor = hf[f"transformer.h.{layer}.{theirs}.{kind}"]
                weights[f"blocks.{layer}.{ours}.{kind}"] = tensor.T if tensor.ndim == 2 else tensor
    return weights


def _llama_weights(hf: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    weights = {
        "embed.weight": hf["model.embed_tokens.weight"],
        "norm.weight": hf["model.norm.weight"],
        "head.weight": hf["lm_head.weight"],
    }
    for layer in range(shape.n_layers):
        for theirs, ours in _LLAMA_NAMES.items():
            weights[f"blocks.{layer}.{ours}.weight"] = hf[f"model.layers.{layer}.{theirs}.weight"]
    return weights


def random_gpt2(seed: int = 0, **overrides):
    """Make a tiny transformers GPT2LMHeadModel with weights large enough that every mistake shows."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"vocab_size": 61, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 4}
    off = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    return _enlarge(GPT2LMHeadModel(GPT2Config(**settings | off | overrides)))


def random_llama(seed: int = 0, **overrides):
    """Make a tiny transformers LlamaForCausalLM with grouped heads and large weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    ends = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(seed)
    return _enlarge(LlamaForCausalLM(LlamaConfig(**settings | heads | ends | overrides)))


def _enlarge(hf_model):
    """Replace 0 biases and 1 norms by random ones and make matrices four times as large."""
    with torch.no_grad():
        for parameter in hf_model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4.0)
    return hf_model.eval()
