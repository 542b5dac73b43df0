"""Bytes that the forward pass keeps for the backward pass, by part of the decoder (no torch).

Read off `models.decoder`: what each operation's derivative needs. Under autocast a linear layer keeps a
low-precision copy of its input and of its weight; norms and the residual stream stay in fp32. With sequence
parallelism norms and the stream have a part of each sequence, linear layers the whole (Korthikanti et al.
2022, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.plan.workload import Workload


@dataclass(frozen=True)
class BlockBytes:
    """One micro-batch in one block."""

    stream: int  # the residual stream, which enters the block
    saved: int  # without recompute, beside the stream
    products: int  # results of linear layers, all that recompute = selective keeps beside the stream
    recomputed_saved: int  # of `saved`, what is made again where the products are kept
    workspace: int  # of the backward pass, at its largest
    result: int  # of its attention, and of its MLP
    weight_copies: int  # under autocast

    @property
    def put_off(self) -> int:
        """Gradients that those of weights are made of: of linear layers' results, norms' and sums'."""
        return self.products + 3 * self.stream


@dataclass(frozen=True)
class EndBytes:
    """One micro-batch after the last block."""

    saved: int
    logits: int
    loss_workspace: int
    workspace: int  # of the backward pass of the head, beside its gradient
    norm_workspace: int  # of the backward pass of the last norm
    table: int  # under autocast, a copy of the head's weight, in `saved`


_LOSS_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 27}  # elements; shoal.models.loss


def block_bytes(workload: Workload) -> BlockBytes:
    """Return the bytes of a block on one rank."""
    shape, layout = workload.shape, workload.layout
    size, low = workload.activation_bytes, workload.dtype != "fp32"
    gpt2 = shape.style == "gpt2"
    tokens, own = _tokens(workload)
    d, heads = shape.d_model, shape.n_heads // layout.tp
    q, kv = heads * shape.head_dim, shape.n_kv_heads // layout.tp * shape.head_dim
    wide = tokens * shape.d_ff // layout.tp * size
    stream, inner = 4 * own * d, tokens * d * size
    scores = tokens * workload.config.train.seq_len * heads
    projections = tokens * (q + 2 * kv) * size
    out = tokens * q * size
    attention = out + 4 * tokens * heads + (0 if gpt2 else out)  # log-sum-exp; RoPE's heads are copied back
    attention_work = 0
    if shape.attention_dropout:
        softmax = size if workload.cluster.device.kind == "cpu" else 4  # CUDA's autocast takes it to fp32
        attention = out + scores * (softmax + size + 1)  # with what is left of it, and the mask
        attention_work = scores * (2 * softmax + size)
    inputs = inner * (5 if not gpt2 else 4) if low else 2 * inner
    norms = 2 * _norm_bytes(workload, own)
    mid = stream
    masks = 2 * own * d if shape.dropout else 0
    mlp = wide * (2 if gpt2 else 4)
    saved = inputs + norms + projections + attention + mid + mlp + masks
    products = projections + 2 * inner + wide * (1 if gpt2 else 2)
    again = saved - projections - wide * (1 if gpt2 else 2)
    whole_gradient = inner if low or layout.sequence else 0
    mlp_work = stream + wide * (1 if gpt2 else 2) + whole_gradient
    matrices = (2 * d * q + 2 * d * kv + (2 if gpt2 else 3) * d * shape.d_ff // layout.tp) if low else 0
    return BlockBytes(
        stream, saved, products, again, max(mlp_work, attention_work + stream - mlp), inner, size * matrices
    )


def end_bytes(workload: Workload) -> EndBytes:
    """Return the bytes of the last norm, the head and the loss on one rank."""
    shape, size = workload.shape, workload.activation_bytes
    tokens, own = _tokens(workload)
    columns = shape.padded_vocab_size // workload.layout.tp
    inner = tokens * shape.d_model * size
    logits = tokens * columns * size
    chunk = min(_LOSS_CHUNK[workload.cluster.device.kind], tokens * columns)
    decomposed = shape.style == "llama" and workload.cluster.device.kind == "cpu"
    table = columns * shape.d_model * size if size == 2 else 0
    return EndBytes(
        saved=4 * own * shape.d_model + _norm_bytes(workload, own) + inner + table,
        logits=logits,
        loss_workspace=4 * chunk * (2 if size == 2 else 1),  # in fp32, and its exponentials
        workspace=inner,
        norm_workspace=4 * own * shape.d_model * (5 if decomposed else 2),
        table=table,
    )


def _tokens(workload: Workload) -> tuple[int, int]:
    """Return the tokens of a micro-batch, and those of a rank's part of the residual stream."""
    train, layout = workload.config.train, workload.layout
    tokens = train.micro_batch_size * train.seq_len
    return tokens, tokens // (layout.tp if layout.sequence else 1)


def _norm_bytes(workload: Workload, own: int) -> int:
    """Return what a norm keeps beside its input: statistics, and of a CPU's RMSNorm more."""
    if workload.shape.style == "gpt2":
        return 8 * own
    if workload.cluster.device.kind == "cpu":
        return 4 * own * workload.shape.d_model + 4 * own
    return 4 * own
