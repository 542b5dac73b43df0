"""What is planned: a configuration under a layout on a cluster, with all that follows from it (no torch)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shoal.config.layout import Layout
from shoal.config.layout_rules import layers_of_stages
from shoal.config.rules import grad_accum_steps
from shoal.config.sections import Config
from shoal.models.shape import ModelShape
from shoal.plan.cluster import Cluster


@dataclass(frozen=True)
class Workload:
    """A configuration under a layout on a cluster. `config.parallel` agrees with `layout`."""

    config: Config
    shape: ModelShape
    layout: Layout
    cluster: Cluster
    dtype: str  # of matrix products: fp32, bf16 or fp16; never auto

    @property
    def activation_bytes(self) -> int:
        """Bytes of a value that a matrix product reads or writes."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a rank in a step."""
        return grad_accum_steps(self.config, self.layout.batch_parts)

    @cached_property
    def stages_of_ranks(self) -> list[list[range]]:
        """Layers of each pipeline stage that a rank holds, by rank along pp; with two stages a rank, both."""
        layers = layers_of_stages(self.config, self.layout, self.shape.n_layers)
        return [layers[rank :: self.layout.pp] for rank in range(self.layout.pp)]

    @property
    def global_tokens(self) -> int:
        """Tokens of an optimiser step."""
        return self.config.train.global_batch_size * self.config.train.seq_len


@functools.cache
def weight_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a decoder, in model order; those of a norm are one."""
    return dict(_named(shape))


def _named(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, kv, ff = shape.d_model, shape.n_kv_heads * shape.head_dim, shape.d_ff
    gpt2 = shape.style == "gpt2"
    yield "embed", (shape.padded_vocab_size, d)
    if gpt2:
        yield "positions", (shape.max_seq_len, d)
    mlp = {"up": (ff, d), "down": (d, ff)} if gpt2 else {"gate": (ff, d), "up": (ff, d), "down": (d, ff)}
    for layer in range(shape.n_layers):
        for name, rows in {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d), **mlp}.items():
            yield f"{layer}.{name}", rows
            if gpt2:
                yield f"{layer}.{name}.bias", rows[:1]
        for name in ("attention_norm", "mlp_norm"):
            yield f"{layer}.{name}", (d * (2 if gpt2 else 1),)
    yield "norm", (d * (2 if gpt2 else 1),)
    if not shape.tie_embeddings:
        yield "head", (shape.padded_vocab_size, d)
