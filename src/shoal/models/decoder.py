"""One decoder for the GPT-2 and the Llama style; it knows nothing of ranks.

Tensor names end in their shape: b batch, t time, d d_model, h heads, c head_dim, s columns attended to,
v padded vocabulary.
Nothing that matters is kept in a buffer: the model is right after `to_empty` and new weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from shoal.errors import ConfigError
from shoal.models import documents
from shoal.models.cache import CachePart
from shoal.models.dropout import keyed_dropout, site_id
from shoal.models.part import Part
from shoal.models.recompute import keeping_products, run_in_chunks
from shoal.models.shape import ModelShape

TIED = "embed.weight"  # the name of an embedding that is the head's weight, too


class Context(NamedTuple):
    """What a block needs in one forward pass beside the residual stream.

    `sites` are its places of dropout: attention probabilities, attention, MLP. They are a tensor because
    plain numbers would make the compiler compile each block anew.
    """

    rotation: tuple[Tensor, Tensor] | None  # cos and sin, [batch or 1, 1, time, head_dim / 2]; llama
    mask: Tensor | BlockMask | None  # a tensor is bool [batch, 1, time, columns]; None means causal
    cache: CachePart | None
    dropout_keys_b: Tensor | None
    sites: Tensor | None = None  # int64 [3]; only where something is dropped


def rotation_tables(positions_bt: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, fp32 [batch, 1, time, head_dim / 2] (Su et al., RoFormer)."""
    exponent = torch.arange(0, head_dim, 2, device=positions_bt.device, dtype=torch.float32) / head_dim
    angles = positions_bt[:, None, :, None].float() * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


def rotate(x_bhtc: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) by its angle; the half-rotation layout of Llama checkpoints."""
    first, second = x_bhtc.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x_bhtc)


class Attention(nn.Module):
    """Causal attention with grouped key and value heads; four projections, to be cut by heads."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        bias = shape.style == "gpt2"
        d_kv = shape.n_kv_heads * shape.head_dim
        self.q = nn.Linear(shape.d_model, shape.d_model, bias=bias)
        self.k = nn.Linear(shape.d_model, d_kv, bias=bias)
        self.v = nn.Linear(shape.d_model, d_kv, bias=bias)
        self.o = nn.Linear(shape.d_model, shape.d_model, bias=bias)
        self.head_dim = shape.head_dim
        self.dropout = shape.attention_dropout
        self.layer = layer
        self.part = 0  # of the heads, where other processes hold the others

    def forward(self, x_btd: Tensor, context: Context) -> Tensor:
        batch, time, _ = x_btd.shape
        q_bhtc, k_bhtc, v_bhtc = (
            projection(x_btd).view(batch, time, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        if context.rotation is not None:
            q_bhtc, k_bhtc = rotate(q_bhtc, *context.rotation), rotate(k_bhtc, *context.rotation)
        if context.cache is not None:
            k_bhtc, v_bhtc = context.cache.extend(self.layer, k_bhtc, v_bhtc)
        y_bhtc = self._attend(q_bhtc, k_bhtc, v_bhtc, context)
        return self.o(y_bhtc.transpose(1, 2).reshape(batch, time, -1))

    def _attend(self, q_bhtc: Tensor, k_bhsc: Tensor, v_bhsc: Tensor, context: Context) -> Tensor:
        grouped = q_bhtc.shape[1] != k_bhsc.shape[1]
        if isinstance(context.mask, BlockMask):
            return documents.attend(q_bhtc, k_bhsc, v_bhsc, context.mask)
        if self.dropout and context.dropout_keys_b is not None:
            return self._attend_with_dropout(q_bhtc, k_bhsc, v_bhsc, context)
        causal = context.mask is None and q_bhtc.shape[2] > 1  # one cached token sees all columns
        return F.scaled_dot_product_attention(
            q_bhtc, k_bhsc, v_bhsc, attn_mask=context.mask, is_causal=causal, enable_gqa=grouped
        )

    def _attend_with_dropout(
        self, q_bhtc: Tensor, k_bhtc: Tensor, v_bhtc: Tensor, context: Context
    ) -> Tensor:
        """Plain attention: the fused kernels take no mask of ours for the probabilities."""
        assert context.dropout_keys_b is not None
        assert context.sites is not None
        time, groups = q_bhtc.shape[2], q_bhtc.shape[1] // k_bhtc.shape[1]
        k_bhtc, v_bhtc = k_bhtc.repeat_interleave(groups, 1), v_bhtc.repeat_interleave(groups, 1)
        scores_bhtt = q_bhtc @ k_bhtc.transpose(2, 3) * self.head_dim**-0.5
        seen = torch.ones(time, time, dtype=torch.bool, device=q_bhtc.device).tril()
        seen = seen if context.mask is None else cast(Tensor, context.mask)
        probabilities_bhtt = scores_bhtt.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        kept_bhtt = keyed_dropout(
            probabilities_bhtt, self.dropout, context.dropout_keys_b, context.sites[0], self.part
        )
        return kept_bhtt.type_as(v_bhtc) @ v_bhtc


class GeluMlp(nn.Module):
    """The MLP of GPT-2: GELU in its tanh form."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.d_model, shape.d_ff)
        self.down = nn.Linear(shape.d_ff, shape.d_model)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_btd), approximate="tanh"))


class SwigluMlp(nn.Module):
    """The gated MLP of Llama (Shazeer, GLU Variants)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.d_model, shape.d_ff, bias=False)
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=False)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_btd)) * self.up(x_btd))


class Block(nn.Module):
    """One pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape, layer)
        self.mlp_norm = _norm(shape)
        self.mlp = GeluMlp(shape) if shape.style == "gpt2" else SwigluMlp(shape)
        self.dropout = shape.dropout
        self.part = 0  # of each sequence, where other processes hold the others
        self.recompute = False  # all but the matrix products

    def forward(self, x_btd: Tensor, context: Context) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return keeping_products(self._run, x_btd, context)
        return self._run(x_btd, context)

    def _run(self, x_btd: Tensor, context: Context) -> Tensor:
        x_btd = x_btd + self._drop(self.attention(self.attention_norm(x_btd), context), context, 1)
        return x_btd + self._drop(self.mlp(self.mlp_norm(x_btd)), context, 2)

    def _drop(self, x_btd: Tensor, context: Context, site: int) -> Tensor:
        if context.sites is None:
            return x_btd
        return maybe_dropout(x_btd, self.dropout, context.dropout_keys_b, context.sites[site], self.part)


class Head(nn.Module):
    """Logits over the padded vocabulary; padded columns are -inf: no probability and no gradient."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.padded_vocab_size, shape.d_model))
        self.vocab_size = shape.vocab_size

    def forward(self, x_btd: Tensor) -> Tensor:
        return without_padding(F.linear(x_btd, self.weight), self.vocab_size)


def without_padding(logits_btv: Tensor, vocab_size: int) -> Tensor:
    """Set the columns from `vocab_size` on to -inf, in place."""
    if vocab_size >= logits_btv.shape[-1]:
        return logits_btv
    masked: Tensor = _WithoutPadding.apply(logits_btv, vocab_size)
    return masked


class _WithoutPadding(torch.autograd.Function):
    """What a bias of -inf would do, without the copies of all logits that torch makes for one.

    The gradient passes as it is: what -inf has no part in has none with respect to it, either.
    """

    @staticmethod
    def forward(ctx: Any, logits_btv: Tensor, vocab_size: int) -> Tensor:
        ctx.mark_dirty(logits_btv)
        logits_btv[..., vocab_size:] = float("-inf")
        return logits_btv

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Decoder(Part):
    """A decoder-only language model of the given shape, or the part of one with only some of its layers."""

    def __init__(self, shape: ModelShape, layers: range | None = None) -> None:
        """Make the whole model, or some layers of it: the first brings embeddings, the last the head."""
        super().__init__()
        self.shape = shape
        layers = range(shape.n_layers) if layers is None else layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == shape.n_layers
        learned = self.is_first and shape.style == "gpt2"
        self.embed = nn.Embedding(shape.padded_vocab_size, shape.d_model) if self.is_first else None
        self.positions = nn.Embedding(shape.max_seq_len, shape.d_model) if learned else None
        self.blocks = nn.ModuleDict({str(layer): Block(shape, layer) for layer in layers})
        self.norm = _norm(shape) if self.is_last else None
        self.head = Head(shape) if self.is_last else None
        self.site = site_id("embed")
        self.part, self.parts = 0, 1  # of each sequence, where several processes share it
        self.head_parts = 1  # that the attention heads are cut into
        self._known_sites: dict[tuple[str, torch.device], Tensor] = {}
        self.recompute_layers = 0  # layers in a chunk of which only the input is kept; 0: keep everything
        self.recompute_offload = False  # these inputs lie in host memory
        self._tie()

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names they have in the whole model; a tied one as the embedding."""
        weights = dict(self.named_parameters())
        if self.shape.tie_embeddings and not self.is_first and self.is_last:
            weights[TIED] = weights.pop("head.weight")
        return weights

    def initial_std(self, name: str) -> float:
        """Return the deviation of a matrix's first values, GPT-2's: smaller where it writes to the stream."""
        residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
        return 0.02 / (2 * self.shape.n_layers) ** 0.5 if residual else 0.02

    def rows_in_use(self, name: str) -> int | None:
        """Return how many rows of a matrix stand for token ids; the padding after them begins as 0."""
        return self.shape.vocab_size if name in (TIED, "head.weight") else None

    def smallest_call(self, device: torch.device) -> dict[str, Tensor]:
        """Return arguments for one token."""
        zero = torch.zeros(1, dtype=torch.long, device=device)
        return {"inputs": zero[None], "dropout_keys_b": zero}

    def set_recompute(
        self, mode: Literal["none", "full", "selective"], layers: int, *, offload: bool = False
    ) -> None:
        """Choose what backward computes again; mode full: in chunks of `layers`, the last may be smaller."""
        self.recompute_layers = layers if mode == "full" else 0
        self.recompute_offload = offload
        for block in self.blocks.values():
            cast(Block, block).recompute = mode == "selective"

    def forward(
        self,
        inputs: Tensor,
        *,
        dropout_keys_b: Tensor | None = None,
        cache: CachePart | None = None,
        documents_bt: Tensor | None = None,
    ) -> Tensor:
        """Return logits [batch, time, padded_vocab_size]; padded columns are -inf.

        `inputs` are tokens [batch, time]. A part without the last layer returns the residual stream [batch,
        time, d_model], which is what a part without the first one takes.

        `dropout_keys_b` int64 [batch] turns dropout on, a key for each sample. With a `cache`, the tokens
        follow what its rows hold, and these grow by them. `documents_bt` numbers the document of each token,
        never falling along a row: a token sees only its own, and positions restart with each. A ConfigError
        refuses more positions than the learned table has.
        """
        x_btd = self.hidden(inputs, dropout_keys_b=dropout_keys_b, cache=cache, documents_bt=documents_bt)
        return x_btd if self.head is None else self.head(x_btd)

    def hidden(
        self,
        inputs: Tensor,
        *,
        dropout_keys_b: Tensor | None = None,
        cache: CachePart | None = None,
        documents_bt: Tensor | None = None,
    ) -> Tensor:
        """Return what the head turns into logits, [batch, time, d_model]; arguments as of `forward`."""
        time = inputs.shape[1] * (1 if self.is_first else self.parts)
        self._check_call(time, dropout_keys_b, cache)
        positions, mask = self._places(time, inputs.device, dropout_keys_b, cache, documents_bt)
        rotation = None
        x_btd = inputs if self.embed is None else self.embed(inputs)
        if self.positions is not None:
            x_btd = x_btd + self.positions(positions)
        if self.shape.style == "llama":
            rotation = rotation_tables(positions, self.shape.head_dim, self.shape.rope_theta)
        if self.is_first:
            x_btd = maybe_dropout(x_btd, self.shape.dropout, dropout_keys_b, self.site, self.part)
        x_btd = self._run_blocks(x_btd, Context(rotation, mask, cache, dropout_keys_b))
        if cache is not None:
            cache.advance(time)
        return x_btd if self.norm is None else self.norm(x_btd)

    def _places(
        self,
        time: int,
        device: torch.device,
        dropout_keys_b: Tensor | None,
        cache: CachePart | None,
        documents_bt: Tensor | None,
    ) -> tuple[Tensor, Tensor | BlockMask | None]:
        """Return each token's position and which columns it sees."""
        if cache is not None:
            assert documents_bt is None, "a cache holds one document a row"
            return cache.positions(time), cache.mask(time)
        if documents_bt is None:
            return torch.arange(time, device=device)[None], None
        plain = dropout_keys_b is not None and self.shape.attention_dropout > 0.0
        dense = plain or documents_bt.device.type == "cpu"
        mask = documents.dense_mask(documents_bt) if dense else documents.block_mask(documents_bt)
        return documents.restarted_positions(documents_bt), mask

    def _run_blocks(self, x_btd: Tensor, context: Context) -> Tensor:
        blocks: list[Callable[[Tensor], Tensor]] = []
        for layer, block in self.blocks.items():
            blocks.append(partial(block, context=context._replace(sites=self._sites(layer, context))))
        layers = self.recompute_layers if torch.is_grad_enabled() else 0
        return run_in_chunks(blocks, x_btd, layers, offload=self.recompute_offload)

    def _sites(self, layer: str, context: Context) -> Tensor | None:
        """Return a layer's places of dropout on the device of the keys, copied there once; see Context."""
        if context.dropout_keys_b is None or not (self.shape.dropout or self.shape.attention_dropout):
            return None
        device = context.dropout_keys_b.device
        if (layer, device) not in self._known_sites:
            names = ("attention.probabilities", "attention", "mlp")
            sites = torch.tensor([site_id(f"blocks.{layer}.{name}") for name in names])
            self._known_sites[layer, device] = sites.to(device)
        return self._known_sites[layer, device]

    def _check_call(self, time: int, dropout_keys_b: Tensor | None, cache: CachePart | None) -> None:
        shape = self.shape
        needs_keys = self.training and torch.is_grad_enabled() and (shape.dropout or shape.attention_dropout)
        assert dropout_keys_b is not None or not needs_keys, "training with dropout needs dropout_keys_b"
        longest = time if cache is None else cache.longest(time)
        if self.positions is not None and longest > shape.max_seq_len:
            raise ConfigError(
                f"a sequence of {longest} tokens does not fit model.max_seq_len = {shape.max_seq_len}",
                hint=f"use at most {shape.max_seq_len} tokens; learned positions do not go further",
            )

    def _tie(self) -> None:
        if self.shape.tie_embeddings and self.embed is not None and self.head is not None:
            self.head.weight = cast(nn.Parameter, self.embed.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Tie again after `to_empty` and the like, which replace a parameter that changes its device type."""
        super()._apply(fn, recurse)
        self._tie()
        return self


def maybe_dropout(x: Tensor, p: float, keys_b: Tensor | None, site: int | Tensor, part: int = 0) -> Tensor:
    """Apply keyed dropout where there are keys and something to drop."""
    return x if keys_b is None or p == 0.0 else keyed_dropout(x, p, keys_b, site, part)


def _norm(shape: ModelShape) -> nn.Module:
    kind = nn.LayerNorm if shape.style == "gpt2" else nn.RMSNorm
    return kind(shape.d_model, eps=shape.norm_eps)
