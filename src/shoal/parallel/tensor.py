"""Tensor parallelism: ranks along `tp` share each layer's matrices, heads and the vocabulary.

Cut parameters are DTensors, so that every later step knows their whole shape; modules compute on the local
parts and exchange activations here, nowhere else. Between the layers every rank holds the whole residual
stream or, with sequence parallelism (Korthikanti et al., 2022), its part of each sequence:

    enter:  whole stream: nothing forward, all_reduce backward;   parts: all_gather, reduce_scatter backward
    leave:  whole stream: all_reduce, nothing backward;           parts: reduce_scatter, all_gather backward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.models.decoder import Block, Decoder, without_padding

_COLUMN = ("attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate")  # cut by what they put out
_ROW = ("attention.o", "mlp.down")  # cut by what they take in


class VocabularyPart:
    """The columns of the logits that this rank holds; see shoal.models.loss.Columns."""

    def __init__(self, mesh: DeviceMesh, padded_vocab_size: int) -> None:
        self._group = mesh.get_group()
        self._parts = mesh.size()
        self.size = padded_vocab_size // self._parts
        self.first = mesh.get_local_rank() * self.size

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, stacked along a new first dim. Collective over tp."""
        return _all_gather(x, self._group, self._parts)


class TensorParallel:
    """Cuts a decoder along `tp`."""

    def __init__(self, mesh: DeviceMesh, *, sequence: bool) -> None:
        self._mesh = mesh
        self._group = mesh.get_group()
        self._rank, self._parts = mesh.get_local_rank(), mesh.size()
        self._sequence = sequence
        self.partial: list[
            tuple[nn.Module, str]
        ] = []  # whose gradient each rank has for its sequence part only

    def cut(self, model: Decoder) -> None:
        """Cut the parameters of a model, on any device, and have its modules exchange activations."""
        if self._sequence:
            model.part, model.parts = self._rank, self._parts
        if model.embed is not None:
            self._cut_embeddings(model)
        for block in model.blocks.values():
            self._cut_block(cast(Block, block))
        if model.norm is not None and model.head is not None:
            self._cut_norm(model.norm)
            self._cut_head(model)

    def partial_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are to be summed over tp, as they are now."""
        return [cast(nn.Parameter, getattr(module, name)) for module, name in self.partial]

    def _cut_block(self, block: Block) -> None:
        block.attention.part = self._rank
        if self._sequence:
            block.part = self._rank
        for norm in (block.attention_norm, block.mlp_norm):
            self._cut_norm(norm)
        for inner in (block.attention, block.mlp):
            _before(inner, self._enter)
        for name in _COLUMN + _ROW:
            if (linear := _find(block, name)) is not None:
                self._cut_linear(linear, row=name in _ROW)

    def _cut_linear(self, linear: nn.Linear, *, row: bool) -> None:
        self._distribute(linear, "weight", Shard(1 if row else 0))
        if linear.bias is not None:
            self._distribute(linear, "bias", Replicate() if row else Shard(0), partial=row)

        def column(x: Tensor) -> Tensor:
            return F.linear(x, local(linear.weight), _local_bias(linear))

        def rows(x: Tensor) -> Tensor:
            y = self._leave(F.linear(x, local(linear.weight)))
            return y if linear.bias is None else y + local(linear.bias).to(y.dtype)

        _replace_forward(linear, rows if row else column)

    def _cut_norm(self, norm: nn.Module) -> None:
        self._distribute(norm, "weight", Replicate(), partial=True)
        if isinstance(norm, nn.LayerNorm):
            self._distribute(norm, "bias", Replicate(), partial=True)
            _replace_forward(
                norm,
                lambda x: F.layer_norm(
                    x, norm.normalized_shape, local(norm.weight), local(norm.bias), norm.eps
                ),
            )
        elif isinstance(norm, nn.RMSNorm):
            _replace_forward(
                norm, lambda x: F.rms_norm(x, norm.normalized_shape, local(norm.weight), norm.eps)
            )

    def _cut_embeddings(self, model: Decoder) -> None:
        embed, positions = model.embed, model.positions
        assert embed is not None
        self._distribute(embed, "weight", Shard(0))
        part = VocabularyPart(self._mesh, model.shape.padded_vocab_size)

        def look_up(tokens_bt: Tensor) -> Tensor:
            row_bt = tokens_bt - part.first
            held_bt1 = ((row_bt >= 0) & (row_bt < part.size)).unsqueeze(-1)
            x_btd = F.embedding(row_bt.clamp(0, part.size - 1), local(embed.weight))
            return self._leave(x_btd * held_bt1)

        _replace_forward(embed, look_up)
        if positions is not None:
            self._distribute(positions, "weight", Replicate(), partial=True)
            _replace_forward(positions, lambda at: F.embedding(self._own_part(at), local(positions.weight)))

    def _cut_head(self, model: Decoder) -> None:
        head = model.head
        assert head is not None
        if model.shape.tie_embeddings and model.embed is not None:
            head.weight = cast(nn.Parameter, model.embed.weight)
        else:
            self._distribute(head, "weight", Shard(0))
        part = VocabularyPart(self._mesh, model.shape.padded_vocab_size)

        def logits(x_btd: Tensor) -> Tensor:
            logits_btv = F.linear(self._enter(x_btd), local(head.weight))
            return without_padding(logits_btv, max(0, head.vocab_size - part.first))

        _replace_forward(head, logits)

    def _distribute(
        self, module: nn.Module, name: str, placement: Shard | Replicate, *, partial: bool = False
    ) -> None:
        whole = cast(nn.Parameter, getattr(module, name))
        cut = distribute_tensor(whole.data, self._mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(cut))
        if partial and self._sequence:
            self.partial.append((module, name))

    def _enter(self, x_btd: Tensor) -> Tensor:
        """Give every rank the whole sequences, before what is cut by heads, width or ids."""
        if self._sequence:
            return cast(Tensor, _GatherSequence.apply(x_btd, self._group, self._parts))
        return cast(Tensor, _SumBackward.apply(x_btd, self._group))

    def _leave(self, x_btd: Tensor) -> Tensor:
        """Sum what all ranks have worked out; keep the own part of each sequence only, if they are cut."""
        if self._sequence:
            return cast(Tensor, _ScatterSequence.apply(x_btd, self._group, self._parts))
        return cast(Tensor, _SumForward.apply(x_btd, self._group))

    def _own_part(self, positions_bt: Tensor) -> Tensor:
        return positions_bt.chunk(self._parts, dim=1)[self._rank] if self._sequence else positions_bt


def local(parameter: Tensor) -> Tensor:
    """Return the part of a parameter that this rank holds; its gradient goes back to the whole."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _local_bias(module: nn.Linear | nn.LayerNorm) -> Tensor | None:
    return None if module.bias is None else local(module.bias)


def own_part(parameter: Tensor) -> tuple[Tensor, int, int]:
    """Return the part of a parameter that this rank holds, and its first row and column in the whole.

    The offsets are torch's private reckoning, seen on 2.11 to 2.13; a dim that is cut twice needs it.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0, 0
    _, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    row, column = (*offsets, 0)[:2]
    return parameter.to_local(), row, column


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_btd: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
        ctx.group, ctx.parts = group, parts
        return _all_gather(x_btd, group, parts).movedim(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(_sequence_parts(grads[0], ctx.parts), ctx.group), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_btd: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
        ctx.group, ctx.parts = group, parts
        return _reduce_scatter(_sequence_parts(x_btd, parts), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grads[0], ctx.group, ctx.parts).movedim(0, 1).flatten(1, 2), None, None


def _sequence_parts(x_btd: Tensor, parts: int) -> Tensor:
    """Return [parts, batch, time / parts, d_model]."""
    return x_btd.unflatten(1, (parts, -1)).movedim(1, 0)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    whole = x.new_empty((parts * x.shape[0], *x.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name until 2.12
    gather(whole, x.contiguous(), group=group)
    return whole.view(parts, *x.shape)


def _reduce_scatter(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = parts.new_empty(parts.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own, parts.flatten(0, 1), group=group)
    return own


def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change what enters a module as its first argument."""
    plain = module.forward
    _replace_forward(module, lambda x, *rest: plain(change(x), *rest))


def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    setattr(module, "forward", forward)  # noqa: B010


def _find(block: nn.Module, path: str) -> nn.Linear | None:
    outer, _, inner = path.partition(".")
    return cast("nn.Linear | None", getattr(getattr(block, outer), inner, None))
