"""The tensors of a decoder's parameters that one rank holds, by part of the model (no torch)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config.layout import Layout
from shoal.models.shape import ModelShape

Size = tuple[int, int]  # rows and columns; of a vector one column


@dataclass(frozen=True)
class Group:
    """Parameters that belong together: of one block, or of all that is no block."""

    matrices: tuple[Size, ...]
    vectors: tuple[Size, ...]
    orthogonal: bool = False  # Muon takes the matrices

    @property
    def numel(self) -> int:
        """Parameters of a tensor-parallel rank."""
        return self.sharded(1)

    @property
    def count(self) -> int:
        """Tensors."""
        return len(self.matrices) + len(self.vectors)

    def sharded(self, parts: int) -> int:
        """Return the parameters of the first of `parts` ranks, whose rows FSDP2 rounds up (torch.chunk)."""
        return sum(-(-rows // parts) * columns for rows, columns in (*self.matrices, *self.vectors))

    def sharded_matrices(self, parts: int) -> int:
        """Return the same of the matrices alone."""
        return sum(-(-rows // parts) * columns for rows, columns in self.matrices)

    def largest(self) -> int:
        """Return the parameters of the largest tensor."""
        return max((rows * columns for rows, columns in (*self.matrices, *self.vectors)), default=0)


def block_group(shape: ModelShape, tp: int) -> Group:
    """Return the parameters of a block, cut as parallel.tensor does."""
    d, q, kv, ff = (
        shape.d_model,
        shape.d_model // tp,
        shape.n_kv_heads * shape.head_dim // tp,
        shape.d_ff // tp,
    )
    ups = ((ff, d),) if shape.style == "gpt2" else ((ff, d), (ff, d))
    matrices = ((q, d), (kv, d), (kv, d), (d, q), *ups, (d, ff))
    sizes = (q, kv, kv, d, ff, d, d, d, d, d) if shape.style == "gpt2" else (d, d)
    return Group(matrices, tuple((size, 1) for size in sizes), orthogonal=True)


def ends_group(shape: ModelShape, tp: int, *, first: bool, last: bool) -> Group:
    """Return what a rank with the first or last layers has beside blocks."""
    d, table = shape.d_model, (shape.padded_vocab_size // tp, shape.d_model)
    matrices: list[Size] = [table] if first else []
    if first and shape.style == "gpt2":
        matrices.append((shape.max_seq_len, d))
    if last and not (first and shape.tie_embeddings):
        matrices.append(table)
    norm = 2 if shape.style == "gpt2" else 1
    return Group(tuple(matrices), ((d, 1),) * norm if last else ())


def groups_of(shape: ModelShape, layout: Layout, stages: Sequence[range]) -> list[tuple[Group, int]]:
    """Return the groups of a rank with these stages, and how many there are of each."""
    groups = [(block_group(shape, layout.tp), sum(map(len, stages)))]
    for layers in stages:
        first, last = layers.start == 0, layers.stop == shape.n_layers
        if first or last:
            groups.append((ends_group(shape, layout.tp, first=first, last=last), 1))
    return groups


@functools.cache
def weight_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a decoder, under a number, in model order."""
    ends = ends_group(shape, 1, first=True, last=True)
    tables = 2 if shape.style == "gpt2" else 1  # before the blocks: the embedding, and positions
    before = Group(ends.matrices[:tables], ())
    after = Group(ends.matrices[tables:], ends.vectors)
    groups = [before, *[block_group(shape, 1)] * shape.n_layers, after]
    sizes = [size for group in groups for size in (*group.vectors, *group.matrices)]
    return {str(number): size if size[1] > 1 else size[:1] for number, size in enumerate(sizes)}
