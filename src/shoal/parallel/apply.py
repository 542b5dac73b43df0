"""Cut, materialise and wrap a model for several ranks. No other module does this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.config.layout_rules import layers_of_stages
from shoal.config.rules import grad_accum_steps
from shoal.config.sections import Config
from shoal.gradsync.after_backward import SumAfterBackward
from shoal.gradsync.choose import REDUCE_DTYPES, make_exchange, make_owners
from shoal.gradsync.during_backward import SumDuringBackward
from shoal.gradsync.exchange import BackEnd, Exchange
from shoal.gradsync.replicas import WeightOwners
from shoal.models.decoder import TIED, Decoder
from shoal.models.init import initialise
from shoal.models.part import Part
from shoal.models.shape import ModelShape
from shoal.parallel.compile import Compilation, compile_blocks
from shoal.parallel.norm import GradientNorm
from shoal.parallel.pipeline import Pipeline
from shoal.parallel.shard import Sharding
from shoal.parallel.tensor import Axis, TensorParallel, own_part
from shoal.runtime.log import log
from shoal.runtime.mesh import Mesh, local
from shoal.runtime.process import Process

T = TypeVar("T")
Micro = TypeVar("Micro", contravariant=True)


class Trainable(Protocol[Micro]):
    """Interface of a task to layouts: makes parts of a model, and runs them on a micro-batch."""

    @property
    def shape(self) -> ModelShape | None:
        """Shape of a decoder; None for a network that cannot be cut."""

    def parts(self, layers: Sequence[range]) -> Sequence[Part]:
        """Return the parts of the model with these layers."""

    def forward_loss(self, model: nn.Module, micro: Micro, inputs: Tensor | None = None) -> Tensor:
        """Return the summed loss, or the input of the next part; `inputs` is the previous part's output."""


@dataclass(eq=False, repr=False)
class CutModel(Generic[T]):
    """Model in any layout, as the trainer uses it: runs it, sums its gradients, names its weights."""

    parts: Sequence[Part]
    mesh: Mesh
    device: torch.device  # of the computation; offloaded weights are on the host
    forward_loss: Callable[[nn.Module, T], Tensor]
    phase: Callable[[str], AbstractContextManager[Any]]
    exchange: Exchange  # sums over replicas
    sums: Sequence[SumAfterBackward | TensorParallel | WeightOwners] = ()  # in order, after the backward pass
    ddp: DistributedDataParallel | None = None  # with plain data parallelism
    gradient_hook: SumDuringBackward | None = None  # of `ddp`
    sharding: Sharding | None = None
    pipeline: Pipeline[T] | None = None
    owners: WeightOwners | None = None  # with strategies in which one rank updates a weight for all
    _before: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # statistics, and those before a step

    def __post_init__(self) -> None:
        is_cut = self.mesh.axes is not None
        copies = self.mesh.layout.dp * self.mesh.layout.tp if is_cut else 1
        self.gradient_norm = GradientNorm(
            self.updated_weights(),
            is_partial=is_cut or self.owners is not None,
            copies=copies,
            duplicates=self.tied_duplicates,
        )

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return this rank's weights by their names in the whole model; weights that are cut are DTensors."""
        return named_weights(self.parts)

    def updated_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights that this rank updates: all of its weights, unless others own some."""
        return self.named_weights() if self.owners is None else self.owners.owned

    @property
    def own_parameters(self) -> int:
        """Parameters on this rank: with ZeRO, of its shards."""
        return sum(local(weight).numel() for weight in self.named_weights().values())

    @property
    def decoders(self) -> list[Decoder]:
        """Parts of a decoder on this rank; empty for other networks."""
        return [part for part in self.parts if isinstance(part, Decoder)]

    @property
    def tied_duplicates(self) -> set[str]:
        """Names of tied weights on this rank that the first pipeline stage holds too, saves and counts."""
        first = any(part.is_first for part in self.parts)
        return set() if first else {TIED} & self.named_weights().keys()

    def train(self, *, on: bool) -> None:
        """Switch to training or evaluation mode."""
        for part in self.parts:
            part.train(on)
            if on and self.sharding is not None and isinstance(part, Decoder):
                self.sharding.give_back(part)

    def forward_backward(self, micro_batches: list[T], factor: float) -> Tensor:
        """Accumulate gradients of the summed loss times `factor`; return the sum, 0 on ranks without it.

        Gradients are exchanged during the last backward pass, or with ZeRO-2 and 3 during each one.
        Collective.
        """
        if self.pipeline is not None:
            with self.phase("bubble"):
                return self.pipeline.forward_backward(micro_batches, factor)
        total = torch.zeros((), device=self.device)
        self._before = [(t, t.clone()) for part in self.parts for t in part.running_statistics().values()]
        if self.sharding is not None:
            self.sharding.gather_ahead(self.decoders[0])
        for number, micro in enumerate(micro_batches, start=1):
            with self._micro_step(last=number == len(micro_batches)):
                with self.phase("forward"):
                    loss = self.forward_loss(self.ddp or self.parts[0], micro)
                with self.phase("backward"):
                    (loss * factor).backward()
            total += loss.detach()
        return total

    def undo_statistics(self) -> None:
        """Set running statistics to what they were before a step that is left out."""
        for tensor, before in self._before:
            tensor.copy_(before)

    @torch.no_grad()
    def average_statistics(self) -> dict[str, Tensor]:
        """Set running statistics to their mean over the replicas, and return them by name. Collective."""
        named = {name: t for part in self.parts for name, t in part.running_statistics().items()}
        if named and (size := dist.get_world_size()) > 1:
            flat = torch.cat([tensor.flatten() for tensor in named.values()])
            dist.all_reduce(flat)
            for tensor, mean in zip(
                named.values(), (flat / size).split([t.numel() for t in named.values()]), strict=True
            ):
                tensor.copy_(mean.view_as(tensor))
        return named

    def forget_gradients(self) -> None:
        """Reset the gradients. Replicas keep their buckets: new gradients would take as much memory again."""
        weights = list(self.named_weights().values())
        keep = self.owners is not None or self.ddp is not None
        if in_buckets := [w.grad for w in weights if w.grad is not None and keep]:
            torch._foreach_zero_(in_buckets)
            return
        for weight in weights:
            weight.grad = None

    def finish_gradients(self) -> None:
        """Wait until each gradient that this rank needs is the sum over all ranks with a part of the batch.

        Collective.
        """
        if self.gradient_hook is not None:
            self.gradient_hook.wait()
        if self.sharding is not None:
            self.sharding.finish()
        for part in self.sums:
            part.run()

    def evaluate(self, micro_batches: list[T], sizes: list[int]) -> list[Tensor]:
        """Return the summed loss of each micro-batch of `sizes` sequences; empty on ranks without it."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(micro_batches, sizes)
        return [self.forward_loss(self.parts[0], micro) for micro in micro_batches]

    def _micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        if self.sharding is not None:
            self.sharding.micro_step(self.decoders[0], last=last)
        if last or self.ddp is None:
            return nullcontext()
        return self.ddp.no_sync()


def named_weights(parts: Sequence[Part]) -> dict[str, nn.Parameter]:
    """Return the weights of parts of a model by their names in the whole model."""
    return {name: weight for part in parts for name, weight in part.named_weights().items()}


def apply(
    task: Trainable[T],
    mesh: Mesh,
    process: Process,
    config: Config,
    compilation: Compilation,
    axis: Axis | None,
    phase: Callable[[str], AbstractContextManager[Any]],
) -> CutModel[T]:
    """Make the model, or this rank's part of it, in the layout of the mesh. Collective over the world.

    The order is pipeline stages, tensor parallelism, recompute, compile, then ZeRO or replicas. Each step
    wraps the result of the one before: a pipeline stage has whole tensors, tensor parallelism cuts them, ZeRO
    shards what a tensor rank holds, recomputed blocks are compiled, and replicas wrap compiled blocks. All
    steps run on the meta device, so that no rank ever holds more than its own part. Initial weights are a
    function of seed, name and position.
    """
    layout, device, train = mesh.layout, process.device.torch_device, config.train
    reduce_dtype = REDUCE_DTYPES[config.precision.reduce_dtype]
    offload = config.parallel.offload and device.type != "cpu"
    if config.parallel.offload and not offload:
        log.info("parallel.offload = true changes nothing on a CPU, whose memory is the host's")
    if train.recompute_offload and device.type == "cpu":
        log.info("train.recompute_offload = true saves nothing on a CPU, whose memory is the host's")
    numbers = list(range(mesh.pp_rank, layout.stages, layout.pp))
    layers = layers_of_stages(config, layout, task.shape.n_layers if task.shape else 1)
    with torch.device("meta"):
        parts = task.parts([layers[number] for number in numbers])
    tensor = TensorParallel(axis, sequence=layout.sequence) if axis else None
    sharding = None
    if layout.zero:
        sharding = Sharding(mesh["dp_shard"], layout.zero, reduce_dtype, offload=offload, phase=phase)
    for part in parts:
        if isinstance(part, Decoder):
            if tensor is not None:
                tensor.cut(part)
            part.set_recompute(train.recompute, train.recompute_layers, offload=train.recompute_offload)
            if compilation.on:
                compile_blocks(part)
            if sharding is not None:
                sharding.shard(part)
        part.to_empty(device="cpu" if offload else device)
        initialise(part, config.train.seed, own_part)
    weights = named_weights(parts)
    exchange = make_exchange(config, mesh, process, weights)
    whole = partial(CutModel, parts, mesh, device, task.forward_loss, phase, exchange)
    if mesh.axes is None:
        if owners := make_owners(config, process, weights):
            return whole(sums=[owners], owners=owners)
        if process.world_size == 1:
            return whole()
        hook = SumDuringBackward(weights, exchange)
        return whole(ddp=_replicate(parts[0], process, hook, compiled=compilation.on), gradient_hook=hook)
    sums, pipeline = _sums(parts, mesh, tensor, sharding, exchange), None
    if layout.pp > 1:
        pipeline = _pipeline(parts, numbers, mesh, config, task, sharding, phase, device)
    return whole(sums=sums, sharding=sharding, pipeline=pipeline)


def _sums(
    parts: Sequence[Part],
    mesh: Mesh,
    tensor: TensorParallel | None,
    sharding: Sharding | None,
    exchange: Exchange,
) -> list[SumAfterBackward | TensorParallel]:
    """Return the sums that complete the gradients after all backward passes, in order.

    The replicas' exchange, which may round, comes last: its inputs must be complete, and equal on tensor
    ranks that hold the same tensor.
    """
    weights = named_weights(parts)
    sums: list[SumAfterBackward | TensorParallel] = []
    if tensor is not None and sharding is None:  # FSDP has parameters of its own in each pass
        tensor.compute_on_leaves()
        sums.append(tensor)
    if tensor is not None and (own := {id(weight) for weight in tensor.partial_parameters()}):
        named = {name: weight for name, weight in weights.items() if id(weight) in own}
        sums.append(SumAfterBackward(named, BackEnd(mesh.group("tp"))))
    if mesh.layout.dp_replicate > 1:
        sums.append(SumAfterBackward(weights, exchange))
    decoder = next(part for part in parts if isinstance(part, Decoder))
    if mesh.ends is not None and decoder.shape.tie_embeddings and TIED in weights:
        sums.append(SumAfterBackward({TIED: weights[TIED]}, BackEnd(mesh.ends)))
    return sums


def _pipeline(
    parts: Sequence[Part],
    numbers: list[int],
    mesh: Mesh,
    config: Config,
    task: Trainable[T],
    sharding: Sharding | None,
    phase: Callable[[str], AbstractContextManager[Any]],
    device: torch.device,
) -> Pipeline[T]:
    layout, train = mesh.layout, config.train
    decoders = [part for part in parts if isinstance(part, Decoder)]

    def before_backward(part: Decoder, last: bool) -> None:
        if sharding is not None:
            sharding.micro_step(part, last=last)

    time = train.seq_len // (layout.tp if layout.sequence else 1)
    return Pipeline(
        decoders,
        numbers,
        layout.stages,
        run_part=task.forward_loss,
        before_backward=before_backward,
        phase=phase,
        schedule=layout.schedule,
        num_microbatches=grad_accum_steps(config, layout.batch_parts),
        boundary=torch.Size((train.micro_batch_size, time, decoders[0].shape.d_model)),
        group=mesh.group("pp"),
        device=device,
    )


def _replicate(
    part: Part, process: Process, hook: SumDuringBackward, *, compiled: bool
) -> DistributedDataParallel:
    device = process.device.torch_device
    wrapped = DistributedDataParallel(
        part,
        device_ids=[device] if process.device.is_cuda else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # all ranks have computed the same weights
    )
    hook.attach(wrapped)
    # Otherwise the blocks would be compiled for this one token too.
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        _settle_buckets(wrapped, part, hook, device)
    return wrapped


def _settle_buckets(
    wrapped: DistributedDataParallel, part: Part, hook: SumDuringBackward, device: torch.device
) -> None:
    """Run one tiny backward pass, after which DDP has its final order of buckets.

    DDP regroups its buckets once, after the first backward pass. If this were the first real step, the order
    of additions, and so the last bits of the result, would depend on the step at which a process started.
    """
    kept = {name: tensor.clone() for name, tensor in part.running_statistics().items()}
    wrapped(**part.smallest_call(device))[..., :1].sum().backward()
    wrapped.zero_grad(set_to_none=True)
    for name, tensor in part.running_statistics().items():
        tensor.copy_(kept[name])
    hook.begin()
