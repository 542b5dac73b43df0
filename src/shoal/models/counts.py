"""Parameters and floating-point operations of a decoder, from its shape alone (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models.shape import ModelShape


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by what they are for; a tied head counts nothing of its own, padded rows count."""

    embedding: int
    positions: int
    block_matrices: int
    biases_and_norms: int
    head: int

    @property
    def total(self) -> int:
        """All trainable numbers, each once."""
        return self.decay + self.no_decay

    @property
    def decay(self) -> int:
        """Parameters under weight decay: every matrix, embeddings included."""
        return self.embedding + self.positions + self.block_matrices + self.head

    @property
    def no_decay(self) -> int:
        """Parameters without weight decay: biases and norms."""
        return self.biases_and_norms


def count_parameters(shape: ModelShape) -> ParameterCounts:
    """Count the parameters of `Decoder(shape)`."""
    gpt2 = shape.style == "gpt2"
    d, kv = shape.d_model, shape.n_kv_heads * shape.head_dim
    attention = 2 * d * d + 2 * d * kv  # q and o; k and v
    mlp = (2 if gpt2 else 3) * d * shape.d_ff
    biases = (d + kv + kv + d) + (shape.d_ff + d) if gpt2 else 0
    norm = 2 * d if gpt2 else d
    return ParameterCounts(
        embedding=shape.padded_vocab_size * d,
        positions=shape.max_seq_len * d if gpt2 else 0,
        block_matrices=shape.n_layers * (attention + mlp),
        biases_and_norms=shape.n_layers * (biases + 2 * norm) + norm,
        head=0 if shape.tie_embeddings else shape.padded_vocab_size * d,
    )


def flops_per_token(shape: ModelShape, seq_len: int) -> int:
    """Return the operations per trained token, forward and backward: 6 N + 12 n_layers d_model seq_len.

    N is what takes part in matrix products: block matrices and the padded head, tied or not; no position
    table, no embedding look-up. The attention term is PaLM's (appendix B): all pairs count, masked ones too.
    """
    counts = count_parameters(shape)
    matmul = counts.block_matrices + shape.padded_vocab_size * shape.d_model
    return 6 * matmul + 12 * shape.n_layers * shape.d_model * seq_len
