"""Tensor parallelism: ranks along `tp` share each layer's matrices, heads and the vocabulary.

Parameters that are cut are DTensors, which have the whole shape for all later steps. Modules compute on the
local parts; all exchanges of activations are in this module. Between the layers every rank holds the whole
residual stream or, with sequence parallelism (Korthikanti et al., 2022), its part of each sequence:

    enter:  whole stream: nothing forward, all_reduce backward;   parts: all_gather, reduce_scatter backward
    leave:  whole stream: all_reduce, nothing backward;           parts: reduce_scatter, all_gather backward
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.models.decoder import Block, Decoder, without_padding
from shoal.runtime.mesh import local

_COLUMN = ("attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate")  # cut by their output dim
_ROW = ("attention.o", "mlp.down")  # cut by their input dim
_LEAF = "_leaf"  # suffix of attributes that hold leaves
Collective = Callable[[Tensor], Tensor]


class Axis:
    """Collectives of the ranks along `tp`, timed. Every method is collective over tp."""

    def __init__(self, mesh: DeviceMesh, phase: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.mesh = mesh
        self.rank, self.parts = mesh.get_local_rank(), mesh.size()
        self._group = mesh.get_group()
        self._phase = phase

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, which is not changed, as recompute may keep it."""
        with self._phase("tp"):
            total = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self._group)
            return total

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' `x`, stacked along a new first dim."""
        with self._phase("tp"):
            whole = x.new_empty((self.parts * x.shape[0], *x.shape[1:]))
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
            gather(whole, x.contiguous(), group=self._group)
            return whole.view(self.parts, *x.shape)

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return, on rank n, the sum of all ranks' parts[n]."""
        with self._phase("tp"):
            own = parts.new_empty(parts.shape[1:])
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(own, parts.flatten(0, 1), group=self._group)
            return own

    def gather_sequence(self, x_btd: Tensor) -> Tensor:
        """Concatenate the parts of each sequence."""
        return self.all_gather(x_btd).movedim(0, 1).flatten(1, 2)

    def scatter_sequence(self, x_btd: Tensor) -> Tensor:
        """Return the sum of all ranks' `x_btd` for this rank's part of each sequence."""
        return self.reduce_scatter(x_btd.unflatten(1, (self.parts, -1)).movedim(1, 0))


class VocabularyPart:
    """Columns of the logits that this rank holds; see shoal.models.loss.Columns."""

    def __init__(self, axis: Axis, padded_vocab_size: int) -> None:
        self.size = padded_vocab_size // axis.parts
        self.first = axis.rank * self.size
        self.gather = axis.all_gather


class TensorParallel:
    """Tensor parallelism of a decoder along `tp`."""

    def __init__(self, axis: Axis, *, sequence: bool) -> None:
        self._axis = axis
        self._sequence = sequence
        self._cut: list[tuple[nn.Module, str]] = []
        self.partial: list[
            tuple[nn.Module, str]
        ] = []  # each rank has the gradient of its part of the sequence only
        self._leaves: dict[nn.Parameter, Tensor] = {}
        # Not compiled. As decorators these would import torch's compiler, for half a second of every command.
        self._enter = torch.compiler.disable(self._make_whole)
        self._leave = torch.compiler.disable(self._sum_up)

    def cut(self, model: Decoder) -> None:
        """Cut the parameters of a model, on any device, and add exchanges of activations to its modules."""
        model.head_parts = self._axis.parts
        if self._sequence:
            model.part, model.parts = self._axis.rank, self._axis.parts
        if model.embed is not None:
            self._cut_embeddings(model)
        for block in model.blocks.values():
            self._cut_block(cast(Block, block))
        if model.norm is not None and model.head is not None:
            self._cut_norm(model.norm)
            self._cut_head(model)

    def partial_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients must be summed over tp, after any sharding so far."""
        return [cast(nn.Parameter, getattr(module, name)) for module, name in self.partial]

    def compute_on_leaves(self) -> None:
        """Let modules compute on plain tensors that share the memory of the local parts, once it is final.

        With a DTensor each use of a weight, and its gradient, takes some 0.1 ms of Python. This is 4 % of a
        step of 5 layers of width 256 with 8,192 tokens on two ranks, by torch's profiler.
        """
        for module, name in self._cut:
            whole = cast(nn.Parameter, getattr(module, name))
            if whole not in self._leaves:
                self._leaves[whole] = local(whole).detach().requires_grad_()
            setattr(module, name + _LEAF, self._leaves[whole])

    def run(self) -> None:
        """Set the gradients of the weights to those of their leaves."""
        for whole, leaf in self._leaves.items():
            if leaf.grad is not None:
                mesh, placements = cast(DTensor, whole).device_mesh, cast(DTensor, whole).placements
                whole.grad = DTensor.from_local(
                    leaf.grad, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
                )
                leaf.grad = None

    def _cut_block(self, block: Block) -> None:
        block.attention.part = self._axis.rank
        if self._sequence:
            block.part = self._axis.rank
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
            return F.linear(
                x, _part(linear, "weight"), None if linear.bias is None else _part(linear, "bias")
            )

        def rows(x: Tensor) -> Tensor:
            y = self._leave(F.linear(x, _part(linear, "weight")))
            return y if linear.bias is None else y + _part(linear, "bias").to(y.dtype)

        _replace_forward(linear, rows if row else column)

    def _cut_norm(self, norm: nn.Module) -> None:
        self._distribute(norm, "weight", Replicate(), partial=True)
        if isinstance(norm, nn.LayerNorm):
            self._distribute(norm, "bias", Replicate(), partial=True)
            _replace_forward(
                norm,
                lambda x: F.layer_norm(
                    x, norm.normalized_shape, _part(norm, "weight"), _part(norm, "bias"), norm.eps
                ),
            )
        elif isinstance(norm, nn.RMSNorm):
            _replace_forward(
                norm, lambda x: F.rms_norm(x, norm.normalized_shape, _part(norm, "weight"), norm.eps)
            )

    def _cut_embeddings(self, model: Decoder) -> None:
        embed, positions = model.embed, model.positions
        assert embed is not None
        self._distribute(embed, "weight", Shard(0))
        part = VocabularyPart(self._axis, model.shape.padded_vocab_size)

        def look_up(tokens_bt: Tensor) -> Tensor:
            row_bt = tokens_bt - part.first
            held_bt1 = ((row_bt >= 0) & (row_bt < part.size)).unsqueeze(-1)
            x_btd = F.embedding(row_bt.clamp(0, part.size - 1), _part(embed, "weight"))
            return self._leave(x_btd * held_bt1)

        _replace_forward(embed, look_up)
        if positions is not None:
            self._distribute(positions, "weight", Replicate(), partial=True)
            _replace_forward(
                positions, lambda at: F.embedding(self._own_part(at), _part(positions, "weight"))
            )

    def _cut_head(self, model: Decoder) -> None:
        head = model.head
        assert head is not None
        if model.shape.tie_embeddings and model.embed is not None:
            head.weight = cast(nn.Parameter, model.embed.weight)
            self._cut.append((head, "weight"))
        else:
            self._distribute(head, "weight", Shard(0))
        part = VocabularyPart(self._axis, model.shape.padded_vocab_size)

        def logits(x_btd: Tensor) -> Tensor:
            logits_btv = F.linear(self._enter(x_btd), _part(head, "weight"))
            return without_padding(logits_btv, max(0, head.vocab_size - part.first))

        _replace_forward(head, logits)

    def _distribute(
        self, module: nn.Module, name: str, placement: Shard | Replicate, *, partial: bool = False
    ) -> None:
        whole = cast(nn.Parameter, getattr(module, name))
        cut = distribute_tensor(whole.data, self._axis.mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(cut))
        self._cut.append((module, name))
        if partial and self._sequence:
            self.partial.append((module, name))

    def _make_whole(self, x_btd: Tensor) -> Tensor:
        """Gather whole sequences before a module that is cut by heads, width or ids."""
        axis = self._axis
        if self._sequence:
            return cast(Tensor, _Exchange.apply(x_btd, axis.gather_sequence, axis.scatter_sequence))
        return cast(Tensor, _Exchange.apply(x_btd, _as_it_is, axis.all_reduce))

    def _sum_up(self, x_btd: Tensor) -> Tensor:
        """Sum the outputs of all ranks; if sequences are cut, keep only this rank's part."""
        axis = self._axis
        if self._sequence:
            return cast(Tensor, _Exchange.apply(x_btd, axis.scatter_sequence, axis.gather_sequence))
        return cast(Tensor, _Exchange.apply(x_btd, axis.all_reduce, _as_it_is))

    def _own_part(self, positions_bt: Tensor) -> Tensor:
        return (
            positions_bt.chunk(self._axis.parts, dim=1)[self._axis.rank] if self._sequence else positions_bt
        )


def cut_for_inference(model: Decoder, mesh: DeviceMesh) -> None:
    """Cut a model for inference: every rank takes whole inputs and returns whole logits."""
    axis = Axis(mesh, lambda _: nullcontext())
    TensorParallel(axis, sequence=False).cut(model)
    assert model.head is not None
    columns = model.head.forward
    _replace_forward(model.head, lambda x: axis.all_gather(columns(x)).movedim(0, -2).flatten(-2))


def _part(module: nn.Module, name: str) -> Tensor:
    """Return the local tensor on which a module computes."""
    leaf = cast("Tensor | None", getattr(module, name + _LEAF, None))
    return local(getattr(module, name)) if leaf is None else leaf


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


class _Exchange(torch.autograd.Function):
    """Autograd function with one operation for activations and one for their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.exchange = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange(grads[0]), None, None


def _as_it_is(x: Tensor) -> Tensor:
    return x.view_as(x)


def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the first argument of a module's forward."""
    plain = module.forward
    _replace_forward(module, lambda x, *rest: plain(change(x), *rest))


def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    setattr(module, "forward", forward)  # noqa: B010


def _find(block: nn.Module, path: str) -> nn.Linear | None:
    outer, _, inner = path.partition(".")
    return cast("nn.Linear | None", getattr(getattr(block, outer), inner, None))
