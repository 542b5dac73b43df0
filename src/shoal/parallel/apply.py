"""The one place where a model is cut, materialised and wrapped for several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.config.layout_rules import layers_of_parts
from shoal.config.rules import grad_accum_steps
from shoal.config.sections import Config
from shoal.config.sync_rules import strategy_of
from shoal.gradsync.after_backward import SumAfterBackward
from shoal.gradsync.choose import REDUCE_DTYPES, choose_exchange
from shoal.gradsync.during_backward import SumDuringBackward
from shoal.gradsync.exchange import BackEnd, Exchange
from shoal.gradsync.owners import Owners, make_owners
from shoal.models.classic import Classic
from shoal.models.decoder import TIED, Decoder
from shoal.models.init import initialise
from shoal.models.shape import ModelShape
from shoal.parallel.compile import Compilation, compile_blocks
from shoal.parallel.norm import GradientNorm
from shoal.parallel.pipeline import Pipeline
from shoal.parallel.shard import Sharding
from shoal.parallel.tensor import Axis, TensorParallel, own_part
from shoal.runtime.log import log
from shoal.runtime.mesh import Mesh
from shoal.runtime.process import Process

T = TypeVar("T")
Micro = TypeVar("Micro", contravariant=True)


class Task(Protocol[Micro]):
    """What a layout asks of a task: what a model, or a part of one, does with a micro-batch."""

    @property
    def shape(self) -> ModelShape | None:
        """A decoder's; None: a network that is not cut."""

    def parts(self, layers: Sequence[range]) -> Sequence[Decoder | Classic]:
        """Make the parts of the model with these layers."""

    def run(self, model: nn.Module, micro: Micro, inputs: Tensor | None = None) -> Tensor:
        """Return the summed loss, or what the next part takes; `inputs` is what the part before put out."""


class CutModel(Generic[T]):
    """A model as the trainer sees it, whatever its layout: run it, sum its gradients, name its weights."""

    def __init__(
        self,
        parts: Sequence[Decoder | Classic],
        mesh: Mesh,
        process: Process,
        run: Callable[[nn.Module, T], Tensor],
        phase: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self.parts = parts
        self.mesh = mesh
        self._device = process.device.torch_device  # offloaded weights lie elsewhere
        self._run = run
        self._phase = phase
        self.forward: nn.Module = parts[0]  # with plain data parallelism: the replica
        self.sync: SumDuringBackward | None = None  # the same
        self.sharding: Sharding | None = None
        self.pipeline: Pipeline[T] | None = None
        self.exchange: Exchange = BackEnd()  # sums over replicas
        self.owners: Owners | None = None  # with replicas of which one updates a weight for all
        self.sums: list[SumAfterBackward | TensorParallel | Owners] = []
        cut = mesh.axes is not None
        copies = mesh.layout.dp * mesh.layout.tp if cut else 1
        self.gradient_norm = GradientNorm(
            self.named_weights(), process if cut else None, copies, self.elsewhere
        )

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return this rank's weights, cut ones as DTensors, by their names in the whole model."""
        return {name: weight for part in self.parts for name, weight in part.named_weights().items()}

    def updated_weights(self) -> dict[str, nn.Parameter]:
        """Return those of this rank's weights that it updates: all, unless others own them."""
        return self.named_weights() if self.owners is None else self.owners.owned

    @property
    def decoders(self) -> list[Decoder]:
        """The parts, where they are a decoder's."""
        return [part for part in self.parts if isinstance(part, Decoder)]

    @property
    def elsewhere(self) -> set[str]:
        """Names of weights of this rank that the first pipeline part has, too, and saves and counts."""
        first = any(part.is_first for part in self.parts)
        return set() if first else {TIED} & self.named_weights().keys()

    def train(self, *, on: bool) -> None:
        """Switch to training or evaluation."""
        for part in self.parts:
            part.train(on)
            if on and self.sharding is not None and isinstance(part, Decoder):
                self.sharding.give_back(part)

    def forward_backward(self, micro_batches: list[T], factor: float) -> Tensor:
        """Add the gradients of the summed loss times `factor`; return the sum, 0 where it is not known.

        Gradients travel during the last backward pass, or with ZeRO-2 and 3 during each. Collective.
        """
        if self.pipeline is not None:
            with self._phase("bubble"):
                return self.pipeline.forward_backward(micro_batches, factor)
        total = torch.zeros((), device=self._device)
        if self.sharding is not None:
            self.sharding.gather_ahead(self.decoders[0])
        for number, micro in enumerate(micro_batches, start=1):
            with self._micro_step(last=number == len(micro_batches)):
                with self._phase("forward"):
                    loss = self._run(self.forward, micro)
                with self._phase("backward"):
                    (loss * factor).backward()
            total += loss.detach()
        return total

    def forget_gradients(self) -> None:
        """Begin a step. Replicas add to their buckets, which stay: others would take as much again."""
        weights = list(self.named_weights().values())
        keep = self.owners is not None or self.forward is not self.parts[0]
        if in_buckets := [w.grad for w in weights if w.grad is not None and keep]:
            torch._foreach_zero_(in_buckets)
            return
        for weight in weights:
            weight.grad = None

    def finish_gradients(self) -> None:
        """Return when each gradient that this rank needs is the sum over all that hold a part of the batch.

        Collective.
        """
        if self.sync is not None:
            self.sync.wait()
        if self.sharding is not None:
            self.sharding.finish()
        for part in self.sums:
            part.run()

    def evaluate(self, micro_batches: list[T], sizes: list[int]) -> list[Tensor]:
        """Return the summed loss of each micro-batch of `sizes` sequences; none where it is not known."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(micro_batches, sizes)
        return [self._run(self.parts[0], micro) for micro in micro_batches]

    def _micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        if self.sharding is not None:
            self.sharding.micro_step(self.decoders[0], last=last)
        if last or not isinstance(self.forward, DistributedDataParallel):
            return nullcontext()
        return self.forward.no_sync()


def apply(
    task: Task[T],
    mesh: Mesh,
    process: Process,
    config: Config,
    compilation: Compilation,
    axis: Axis | None,
    phase: Callable[[str], AbstractContextManager[Any]],
) -> CutModel[T]:
    """Make the model, or this rank's part of it, in the layout of the mesh. Collective over the world.

    Pipeline parts, then tensor cuts, recompute, compile, ZeRO or replicas, each wrapping what is there: parts
    have all of their own tensors; shards are made of what a tensor rank holds; the compiler sees what is
    recomputed, and replicas what is compiled. All of it happens on the meta device, so that no rank ever
    holds more than its own; weights are a function of seed, name and place.
    """
    layout, device = mesh.layout, process.device.torch_device
    reduce_dtype = REDUCE_DTYPES[config.precision.reduce_dtype]
    offload = config.parallel.offload and device.type != "cpu"
    if config.parallel.offload and not offload:
        log.info("parallel.offload = true changes nothing on a CPU, whose memory is the host's")
    numbers = list(range(mesh.pp_rank, layout.parts, layout.pp))
    layers = layers_of_parts(config, layout, task.shape.n_layers if task.shape else 1)
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
            part.set_recompute(config.train.recompute, config.train.recompute_layers)
            if compilation.on:
                compile_blocks(part)
            if sharding is not None:
                sharding.shard(part)
        part.to_empty(device="cpu" if offload else device)
        initialise(part, config.train.seed, own_part)
    model = CutModel(parts, mesh, process, task.run, phase)
    model.sharding = sharding
    if strategy_of(config).kind == "exchange":
        model.exchange = choose_exchange(config, mesh, process, model.named_weights())
    if mesh.axes is None:
        if strategy_of(config).kind == "owner":
            _own(model, process, config, reduce_dtype)
        else:
            _replicate(model, process, compiled=compilation.on)
        return model
    model.sums += _sums(model, tensor)
    if layout.pp > 1:
        model.pipeline = _pipeline(model, numbers, config, task, phase, device)
    return model


def _sums(model: CutModel[T], tensor: TensorParallel | None) -> list[SumAfterBackward | TensorParallel]:
    """Return what completes the gradients when all backward passes are done, in its order.

    What a replica's exchange rounds must be complete, and alike on all tensor ranks where they hold it alike.
    """
    weights, mesh = model.named_weights(), model.mesh
    sums: list[SumAfterBackward | TensorParallel] = []
    if tensor is not None and model.sharding is None:  # FSDP has parameters of its own in each pass
        tensor.compute_on_leaves()
        sums.append(tensor)
    if tensor is not None and (partial := {id(weight) for weight in tensor.partial_parameters()}):
        named = {name: weight for name, weight in weights.items() if id(weight) in partial}
        sums.append(SumAfterBackward(named, BackEnd(mesh.group("tp"))))
    if mesh.layout.dp_replicate > 1:
        sums.append(SumAfterBackward(weights, model.exchange))
    tied = model.decoders[0].shape.tie_embeddings and TIED in weights
    if mesh.ends is not None and tied:
        sums.append(SumAfterBackward({TIED: weights[TIED]}, BackEnd(mesh.ends)))
    return sums


def _pipeline(
    model: CutModel[T],
    numbers: list[int],
    config: Config,
    task: Task[T],
    phase: Callable[[str], AbstractContextManager[Any]],
    device: torch.device,
) -> Pipeline[T]:
    layout, train, sharding = model.mesh.layout, config.train, model.sharding

    def before_backward(part: Decoder, last: bool) -> None:
        if sharding is not None:
            sharding.micro_step(part, last=last)

    time = train.seq_len // (layout.tp if layout.sequence else 1)
    return Pipeline(
        model.decoders,
        numbers,
        layout.parts,
        run_part=task.run,
        before_backward=before_backward,
        phase=phase,
        schedule=layout.schedule,
        num_microbatches=grad_accum_steps(config, layout.batch_parts),
        boundary=torch.Size((train.micro_batch_size, time, model.decoders[0].shape.d_model)),
        group=model.mesh.group("pp"),
        device=device,
    )


def _own(model: CutModel[T], process: Process, config: Config, reduce_dtype: torch.dtype) -> None:
    """Give each weight an owner. Collective over the world."""
    strategy, runtime = config.sync.strategy, config.runtime
    owners = make_owners(model.named_weights(), strategy, process, reduce_dtype, runtime)
    model.owners = owners
    model.sums = [owners]
    model.gradient_norm = GradientNorm(owners.owned, process, copies=1, elsewhere=set())


def _replicate(model: CutModel[T], process: Process, *, compiled: bool) -> None:
    if process.world_size == 1:
        return
    model.sync = SumDuringBackward(model.named_weights(), model.exchange)
    wrapped = DistributedDataParallel(
        model.parts[0],
        device_ids=[process.device.torch_device] if process.device.is_cuda else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank computed the same weights
    )
    model.forward = wrapped
    model.sync.attach(wrapped)
    # Compiled code would be made for this one token, too.
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        _settle_buckets(wrapped, model.parts[0], model.sync, process.device.torch_device)


def _settle_buckets(
    wrapped: DistributedDataParallel, part: Decoder | Classic, sync: SumDuringBackward, device: torch.device
) -> None:
    """Run one tiny backward, after which DDP orders its buckets for good.

    DDP regroups its buckets once, after the first backward. Left to the first real step, that would make the
    order of additions, and so the last bits of the result, depend on the step a process started at.
    """
    wrapped(**part.smallest_call(device))[..., :1].sum().backward()
    wrapped.zero_grad(set_to_none=True)
    sync.begin()
