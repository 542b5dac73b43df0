"""What is planned: a configuration under a layout on a cluster, with all that follows from it (no torch)."""

from __future__ import annotations

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
