"""How other programs name and lay out a decoder's tensors. Each table serves both ways: export and import.

Sources: transformers' GPT-2 and Llama, nanoGPT's model.py, and Megatron-LM of 2021 (DeepSpeedExamples).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.models.shape import ModelShape

Family = Literal["gpt2", "nanogpt", "megatron", "llama"]
EMBEDDINGS = ("embed.weight", "head.weight")  # a row for each token id; padded here, not in other files


@dataclass(frozen=True)
class Entry:
    """One tensor of another program's file, and the tensors of ours that it holds, stacked along their rows.

    `transposed`: their matrix is [in, out]. `cut`: the dimension along which Megatron's ranks hold parts of
    each stacked tensor; None where each rank holds it whole.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool
    cut: int | None


@dataclass(frozen=True)
class _Module:
    """A module with a weight and, but for embeddings and Llama's, a bias. `cut` is the weight's."""

    ours: tuple[str, ...]
    hugging_face: str
    megatron: str = ""
    cut: int | None = None
    is_linear: bool = True

    def entries(self, family: Family, layer: int | str = "") -> list[Entry]:
        """Return the entries of weight and bias, in the order in which a module lists them."""
        name = self.megatron if family == "megatron" else self.hugging_face
        stem = {"megatron": "transformer.layers", "llama": "model.layers"}.get(family, "transformer.h")
        theirs = f"{stem}.{layer}.{name}" if layer != "" else name
        prefix = f"blocks.{layer}." if layer != "" else ""
        kinds = ["weight"] if family == "llama" or self in _TABLES else ["weight", "bias"]
        return [
            Entry(
                f"{theirs}.{kind}",
                tuple(f"{prefix}{ours}.{kind}" for ours in self.ours),
                transposed=family == "gpt2" and self.is_linear and kind == "weight",
                cut=self.cut if kind == "weight" or self.cut == 0 else None,
            )
            for kind in kinds
        ]


_QKV = ("attention.q", "attention.k", "attention.v")
_TABLES = (
    _Module(("embed",), "transformer.wte", "word_embeddings", 0, is_linear=False),
    _Module(("positions",), "transformer.wpe", "position_embeddings", is_linear=False),
    _Module(("head",), "lm_head", is_linear=False),
)
_GPT2_BLOCK = (
    _Module(("attention_norm",), "ln_1", "input_layernorm", is_linear=False),
    _Module(_QKV, "attn.c_attn", "attention.query_key_value", 0),
    _Module(("attention.o",), "attn.c_proj", "attention.dense", 1),
    _Module(("mlp_norm",), "ln_2", "post_attention_layernorm", is_linear=False),
    _Module(("mlp.up",), "mlp.c_fc", "mlp.dense_h_to_4h", 0),
    _Module(("mlp.down",), "mlp.c_proj", "mlp.dense_4h_to_h", 1),
)
_LAST_NORM = _Module(("norm",), "transformer.ln_f", "transformer.final_layernorm", is_linear=False)
_LLAMA_BLOCK = (
    _Module(("attention_norm",), "input_layernorm"),
    *(_Module((ours,), f"self_attn.{ours[-1]}_proj") for ours in (*_QKV, "attention.o")),
    _Module(("mlp_norm",), "post_attention_layernorm"),
    *(_Module((f"mlp.{name}",), f"mlp.{name}_proj") for name in ("gate", "up", "down")),
)
_LLAMA_EMBEDDING = _Module(("embed",), "model.embed_tokens")
_LLAMA_NORM = _Module(("norm",), "model.norm")


def table(family: Family, shape: ModelShape) -> list[Entry]:
    """Return every tensor of a model of this shape, in the order of the other program's modules."""
    embedding, positions, head = _TABLES
    llama = family == "llama"
    before = [_LLAMA_EMBEDDING] if llama else [embedding, positions]
    block = _LLAMA_BLOCK if llama else _GPT2_BLOCK
    after = [_LLAMA_NORM if llama else _LAST_NORM, *([] if shape.tie_embeddings else [head])]
    entries = [entry for module in before for entry in module.entries(family)]
    for layer in range(shape.n_layers):
        entries += [entry for module in block for entry in module.entries(family, layer)]
    return entries + [entry for module in after for entry in module.entries(family)]


def family_of(shape: ModelShape) -> Family:
    """Return the family of transformers that computes what a decoder of this shape does."""
    return "llama" if shape.style == "llama" else "gpt2"
