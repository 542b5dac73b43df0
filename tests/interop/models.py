"""Tiny models of other programs, as these save them."""

from __future__ import annotations

import torch
import transformers

MODELS = {
    "gpt2": {"n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 301},
    "gpt2-untied-wide": {
        "n_layer": 3,
        "n_embd": 32,
        "n_head": 2,
        "n_positions": 24,
        "vocab_size": 257,
        "n_inner": 80,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-6,
    },
    "llama-grouped": {
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 100,
        "max_position_embeddings": 32,
        "vocab_size": 509,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "llama-tied": {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 24,
        "vocab_size": 128,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
}


def random_model(name, seed=0, **changes):
    """Return a model of transformers with random weights everywhere."""
    torch.manual_seed(seed)
    kind = ("GPT2", "GPT2LMHeadModel") if name.startswith("gpt2") else ("Llama", "LlamaForCausalLM")
    config = getattr(transformers, f"{kind[0]}Config")(
        **MODELS[name] | changes, bos_token_id=0, eos_token_id=0
    )
    model = getattr(transformers, kind[1])(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too, and logits of order 1
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def nanogpt_file(path, *, bias=True):
    """Write what nanoGPT's train.py saves, of a model whose function transformers knows."""
    theirs = random_model("gpt2")
    held = {}
    for name, tensor in theirs.state_dict().items():
        linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        if name.endswith(".bias") and not bias:
            tensor.zero_()
            continue
        held[f"_orig_mod.{name}"] = tensor.T.contiguous() if linear else tensor.clone()
    args = {"n_layer": 2, "n_head": 4, "n_embd": 48, "block_size": 32, "bias": bias, "vocab_size": 301}
    names = [n.removeprefix("_orig_mod.") for n in held if not n.endswith("lm_head.weight")]
    shapes = {n: held[f"_orig_mod.{n}"].shape for n in names}
    order = [n for n in names if len(shapes[n]) == 2] + [n for n in names if len(shapes[n]) < 2]
    state = {
        number: {
            "step": torch.tensor(7.0),
            "exp_avg": torch.full(shapes[name], number + 1.0),
            "exp_avg_sq": torch.full(shapes[name], number + 0.5),
        }
        for number, name in enumerate(order)
    }
    optimizer = {"state": state, "param_groups": [{"params": list(range(len(order))), "lr": 1e-3}]}
    torch.save(
        {"model": held, "model_args": args, "optimizer": optimizer, "iter_num": 7, "config": {"lr": 1.0}},
        path,
    )
    return theirs, order
