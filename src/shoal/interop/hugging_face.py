"""What transformers keeps beside the weights: config.json and its like, written and read. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.checkpoint.manifest import MANIFEST, refuse_imagined
from shoal.config.sections import Config, Model
from shoal.errors import CheckpointError, ConfigError, InputError
from shoal.models.shape import ModelShape, resolve_shape
from shoal.runtime.files import read_json

_OF_TRAINING = ("vocab_size", "padded_vocab_size", "dropout", "attention_dropout")  # and of the data
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")


def is_hugging_face(path: Path) -> bool:
    """Say whether a folder is Hugging Face's."""
    return (path / "config.json").is_file() and not (path / MANIFEST).exists()


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json."""
    config = read_json(folder / "config.json", "configuration")
    if not isinstance(config, dict):
        raise InputError(f"{folder / 'config.json'} is not a JSON object")
    return config


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights, by their names or by the index of several."""
    for kind in ("model.safetensors", "pytorch_model.bin"):
        if (index := folder / f"{kind}.index.json").is_file():
            content = read_json(index, "index")
            named = content.get("weight_map") if isinstance(content, dict) else None
            names = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
            odd = [name for name in names if Path(name).name != name]
            if odd or not names or not all((folder / name).is_file() for name in names):
                raise CheckpointError(f"{index} names files that are not beside it, or none")
            return [folder / name for name in names]
        if (folder / kind).is_file():
            return [folder / kind]
    raise InputError(
        f"{folder} holds no weights",
        hint="it needs model.safetensors, pytorch_model.bin, or an index of several",
    )


def with_model_of(config: Config, folder: Path) -> Config:
    """Take what `config` does not set of the model from a Hugging Face folder; from any other nothing.

    A ConfigError names the settings to give where `config` sets something else.
    """
    if not is_hugging_face(folder):
        return config
    theirs = model_of(read_config(folder), str(folder / "config.json"))
    shape, ours = resolve_shape(theirs, theirs.vocab_size), config.model
    held = sum(file.stat().st_size for file in weight_files(folder))  # a number takes a byte at least
    refuse_imagined(shape, held, str(folder / "config.json"))
    given = {
        name: value for name in ours.model_fields_set if (value := getattr(ours, name)) or value is False
    }
    wanted = {name: value for name, value in asdict(shape).items() if name not in _OF_TRAINING}
    if other := {name: value for name, value in wanted.items() if given.get(name, value) != value}:
        listed = ", ".join(f"model.{name} = {value}, not {given[name]}" for name, value in other.items())
        settings = " ".join(f"--model.{name}={str(value).lower()}" for name, value in other.items())
        if config.train.seq_len > shape.max_seq_len:
            settings += f" --train.seq_len={shape.max_seq_len}"
        raise ConfigError(f"{folder} has {listed}", hint=f"add {settings}")
    return config.model_copy(update={"model": ours.model_copy(update=wanted)})


def config_json(shape: ModelShape, eod_id: int) -> dict[str, Any]:
    """Return config.json of a GPT2LMHeadModel or LlamaForCausalLM that computes what our decoder does."""
    both = {
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": eod_id,
        "eos_token_id": eod_id,
        "dtype": "float32",
        "use_cache": True,
    }
    if shape.style == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": shape.n_layers,
            "n_embd": shape.d_model,
            "n_head": shape.n_heads,
            "n_inner": shape.d_ff,
            "n_positions": shape.max_seq_len,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": shape.norm_eps,
            "attn_pdrop": shape.attention_dropout,
            "embd_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            **both,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.n_layers,
        "hidden_size": shape.d_model,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.d_ff,
        "max_position_embeddings": shape.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,  # where transformers before version 5 looks
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": shape.attention_dropout,
        **both,
    }


def tokenizer_config(shape: ModelShape, eod: str | None) -> dict[str, Any]:
    """Return tokenizer_config.json beside a tokenizer.json whose document end is `eod`, if it has one."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"eos_token": eod, "bos_token": eod} if eod is not None else {}),
        "model_max_length": shape.max_seq_len,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }


def model_of(config: dict[str, Any], where: str) -> Model:
    """Return the model section for a config.json; an InputError names what our decoder does not compute."""
    kinds = {"gpt2": _gpt2_of, "llama": _llama_of}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InputError(f"{where} is of the kind {kind!r}", hint=f"what can be imported: {', '.join(kinds)}")
    try:
        return kinds[kind](config, where)
    except KeyError as error:
        raise InputError(f"{where} has no entry {error}") from error
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:  # pydantic's, too
        raise InputError(f"{where} has an impossible value: {error}") from error


def _gpt2_of(config: dict[str, Any], where: str) -> Model:
    _refuse(config, where, "scale_attn_weights", (True, None))
    _refuse(config, where, "scale_attn_by_inverse_layer_idx", (False, None))
    _refuse(config, where, "activation_function", (*_GELU_TANH, None))
    return Model(
        style="gpt2",
        n_layers=config["n_layer"],
        d_model=config["n_embd"],
        n_heads=config["n_head"],
        d_ff=config.get("n_inner") or 0,
        max_seq_len=config["n_positions"],
        vocab_size=config["vocab_size"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=config.get("tie_word_embeddings", True),
        dropout=config.get("resid_pdrop", 0.1),
        attention_dropout=config.get("attn_pdrop", 0.1),
    )


def _llama_of(config: dict[str, Any], where: str) -> Model:
    _refuse(config, where, "hidden_act", ("silu", None))
    _refuse(config, where, "attention_bias", (False, None))
    _refuse(config, where, "mlp_bias", (False, None))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = {"rope_type": rope.get("rope_type", rope.get("type"))}  # its name before version 4.43
    _refuse(kind, where, "rope_type", ("default", None))
    for place in (config, rope):
        _refuse(place, where, "partial_rotary_factor", (1, 1.0, None))
    heads, width = config["num_attention_heads"], config["hidden_size"]
    _refuse(config, where, "head_dim", (width // heads, None))
    return Model(
        style="llama",
        n_layers=config["num_hidden_layers"],
        d_model=width,
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        d_ff=config["intermediate_size"],
        max_seq_len=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        tie_embeddings=config.get("tie_word_embeddings", False),
        attention_dropout=config.get("attention_dropout", 0.0),
    )


def _refuse(config: dict[str, Any], where: str, name: str, allowed: tuple[Any, ...]) -> None:
    value = config.get(name)
    if value not in allowed:
        shown = ", ".join(json.dumps(choice) for choice in allowed if choice is not None)
        raise InputError(f"{where} has {name} = {json.dumps(value)}; our decoder computes {shown} only")


def card(shape: ModelShape, state: dict[str, Any], *, has_tokenizer: bool) -> str:
    """Return README.md: what the model is, how far it was trained, how to load it; no local paths."""
    imported = [entry["imported"] for entry in state.get("lineage", []) if "imported" in entry]
    origin = f", from weights of {imported[0].get('format', 'another program')}" if imported else ""
    steps = 0 if imported and not state.get("datasets") else state.get("step", 0)
    loading = ['model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")']
    if has_tokenizer:
        loading.append('tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")')
    data = ", ".join(str(entry.get("fingerprint", "?"))[:12] for entry in state.get("datasets", []))
    rows = {
        "layers, width, heads": f"{shape.n_layers}, {shape.d_model}, {shape.n_heads}",
        "positions": shape.max_seq_len,
        "vocabulary": shape.vocab_size,
        "trained with Shoal": f"{steps:,} steps, {state.get('tokens', 0):,} tokens{origin}",
        "datasets, by fingerprint": data or "none",
    }
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [shoal]",
            "---",
            "",
            f"# A {shape.style} decoder of {shape.n_layers} layers, {shape.d_model} wide",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in rows.items()),
            "",
            "```python",
            f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if has_tokenizer else ''}",
            *loading,
            "```",
            "",
        ]
    )
