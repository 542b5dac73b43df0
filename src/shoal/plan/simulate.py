"""Memory of a rank's step, measured on the real model and wrapping with tensors that take no memory.

Tensors are torch's fake ones, process groups are torch's fake ones, and everything between is what training
runs: `parallel.apply`, the optimiser and the bodies of `train.step`.

torch's own tracker (torch.distributed._tools.mem_tracker) sorts by module calls: gathered weights, flat
buckets, boundaries of stages and logits are all activations or temporary to it. Here each storage keeps a
record, whose category may be found after its life; the history is summed up at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from shoal.data.loader import Batch
from shoal.gradsync.replicas import SynchronousReplicas
from shoal.models import loss
from shoal.parallel import apply as wrapping
from shoal.parallel.compile import Compilation
from shoal.parallel.tensor import Axis, VocabularyPart
from shoal.plan.memory import CATEGORIES, Moment, RankMemory
from shoal.plan.workload import Workload
from shoal.runtime.device import Device
from shoal.runtime.mesh import make_mesh
from shoal.runtime.process import Process
from shoal.runtime.rank_info import RankInfo
from shoal.tasks.gpt import Gpt, MicroBatch
from shoal.train.optimiser import build_optimiser
from shoal.train.step import forward_backward, take_unjudged

_CPU = torch.device("cpu")
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BETWEEN = "between steps"
_CATEGORY_OF_PHASE = {"bubble": "pipeline", "communication": "communication"}  # else activations


@dataclass(eq=False)
class _Record:
    """One storage, and what it turned out to be."""

    category: str
    what: str
    num_bytes: int = 0


_Change = tuple[_Record, int, str]  # bytes, and the moment


class _Tracker(TorchDispatchMode):
    """Notes when each storage begins, changes its size and ends."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.category = "activations"  # of new storages
        self.moment = "start"
        self.paused = False
        self.history: list[_Change] = []
        self._records = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.paused or func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come here again
        kwargs = kwargs or {}
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(given[0], FakeTensor):
            return 1.0 if given[0].is_floating_point() else 1  # stages agree: shapes are known
        if not any(isinstance(each, FakeTensor) for each in given) and _stays_real(func, given, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten.add.Tensor and _sums_gradients(given):
            func, args = torch.ops.aten.add_.Tensor, (given[1], given[0])
        out = func(*args, **kwargs)
        for tensor in tree_iter(out):
            # DTensor has a mode of its own, in which it works out shapes.
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode:
                self._see(tensor, func.name())
        return out

    def assign(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Say what the memory of tensors is."""
        for tensor in tensors:
            if tensor is not None and (record := self._records.get(_storage(tensor))) is not None:
                record.category = "pipeline" if record.category == "pipeline" else category

    def begin(self, moment: str) -> None:
        """Begin a part of the run."""
        self.moment = moment
        self.history.append((_Record("activations", "none"), 0, moment))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note a size that changed outside of an operation, as those of FSDP's gathered weights do."""
        if (record := self._records.get(storage)) is not None:
            record.category = "communication"
            self._change(record, storage.nbytes())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the place of the clock of a run: new storages belong to the phase."""
        before = self.category, self.moment
        self.category = _CATEGORY_OF_PHASE.get(name, "activations")
        self.moment = self.moment if name in ("tp", "shard") else f"{self.moment.split(':')[0]}: {name}"
        try:
            yield
        finally:
            self.category, self.moment = before

    def _see(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        record = self._records.get(storage)
        if record is None:
            record = _Record(self.category, f"{name} {tuple(tensor.shape)} {tensor.dtype}")
            self._records[storage] = record
            weakref.finalize(storage, self._change, record, 0)
        if record.num_bytes != storage.nbytes():
            self._change(record, storage.nbytes())

    def _change(self, record: _Record, num_bytes: int) -> None:
        self.history.append((record, num_bytes - record.num_bytes, self.moment))
        record.num_bytes = num_bytes


def _stays_real(func: Any, given: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Say whether an operation without fake tensors makes none.

    Weights stay on the meta device until they are allocated. Ranks of a mesh, places of micro-batches and
    the like are read, so that they need values; they take a few bytes.
    """
    device = torch.device(kwargs.get("device") or (given[0].device if given else _CPU))
    if given:
        return len({each.device for each in given} | {device}) == 1
    if device.type == "meta":
        return True
    return func.overloadpacket is torch.ops.aten.arange and kwargs.get("dtype") in (None, torch.int64)


def _sums_gradients(given: list[Tensor]) -> bool:
    """Say whether autograd adds two gradients of one activation.

    It does so in place, but where it meets subclasses of tensors, as fake ones are (InputBuffer::accumulate).
    A matrix's gradients, those of a tied one, are added into a new tensor. Seen on torch 2.13.
    """
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()  # as it is where activations are made again
        and len(given) == 2
        and given[0].ndim != 2
        and given[0].shape == given[1].shape
        and given[0].dtype == given[1].dtype
        and _storage(given[0]) is not _storage(given[1])
    )


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


class _PaperTask(Gpt):
    """Language modelling without a dataset."""

    def __init__(self, workload: Workload, axis: Axis | None) -> None:
        self.config, self.shape = workload.config, workload.shape
        columns = VocabularyPart(axis, self.shape.padded_vocab_size) if axis else None
        dtype = _FORMATS[workload.dtype]
        self.device = _CPU
        self._autocast = lambda: torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
        self._cross_entropy = loss.CrossEntropy(columns)
        self._reset_after = 0 if self.config.data.reset_documents else None

    def micro_batches(self, batch: Any) -> list[MicroBatch]:
        size = self.config.train.micro_batch_size
        parts = zip(*(tensor.clone().split(size) for tensor in batch.data), strict=True)
        return [MicroBatch(*part) for part in parts]


class _Replica(DistributedDataParallel):
    """DDP with its first buckets: to order them anew it reads what other ranks sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reducer = _Reducer(self.reducer)


class _Reducer:
    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def simulate(workload: Workload, rank: int = 0) -> RankMemory:
    """Return the memory of a rank between steps, and at the largest moment of each phase of its second step.

    The first step makes the optimiser's state. Kernels are a CPU's; nothing is computed or sent, and nothing
    is known of allocators. The process must not be in a process group.
    """
    layout, steps = workload.layout, 2
    history = record_history(workload, rank, steps)
    return RankMemory(rank // (layout.dp * layout.tp), tuple(_moments(history, steps)))


def record_history(workload: Workload, rank: int, steps: int) -> list[_Change]:
    """Return every change of a rank's memory in its first steps."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = _Tracker(mode)
    with _fake_world(workload, rank, tracker) as process, mode, tracker:
        _run(workload, process, tracker, steps)
    return tracker.history


@contextmanager
def _fake_world(workload: Workload, rank: int, tracker: _Tracker) -> Iterator[Process]:
    plain_resize, chunks = torch.UntypedStorage.resize_, loss.row_chunks
    plain_propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        out = plain_resize(storage, size)
        tracker.resized(storage)
        return out

    def propagate(self: Any, schema: Any) -> Any:
        tracker.paused = True
        try:
            return plain_propagate(self, schema)
        finally:
            tracker.paused = False

    world = workload.layout.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize))
            stack.enter_context(
                patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)
            )
            stack.enter_context(patch.object(wrapping, "DistributedDataParallel", _Replica))
            # Weights have no values, and a large model takes thousands of operations to draw them.
            stack.enter_context(patch.object(wrapping, "initialise", lambda *_: None))
            # Chunks of logits are alike, and a chunk may begin before the memory of the one before is free.
            stack.enter_context(patch.object(loss, "row_chunks", lambda logits: list(chunks(logits))[:2]))
            group = dist.group.WORLD
            assert group is not None
            device = Device(_CPU, "fake", "fake")
            yield Process(RankInfo(rank, world), device, 1, "fake", group, group)
    finally:
        dist.destroy_process_group()


def _run(workload: Workload, process: Process, tracker: _Tracker, steps: int) -> None:
    config = workload.config
    mesh = make_mesh(process, workload.layout, config.runtime.timeout_s)
    axis = Axis(mesh["tp"], tracker.phase) if workload.layout.tp > 1 else None
    task = _PaperTask(workload, axis)
    model = wrapping.apply(task, mesh, process, config, Compilation(False, ""), axis, tracker.phase)
    _name_layer_inputs(model, tracker)
    optimiser = build_optimiser(model.updated_weights(), config.optimizer)
    job: Any = SimpleNamespace(
        config=config,
        task=task,
        model=model,
        optimiser=optimiser,
        clock=tracker,
        precision=SimpleNamespace(scaler=SimpleNamespace(scale=1.0)),
        replicas=SynchronousReplicas(),
        stop=SimpleNamespace(requested=lambda step: False),
        skipped=0,
    )
    weights = model.named_weights()
    for step in range(1, steps + 1):
        tracker.begin(f"step {step}")
        batch = _batch(workload, step)
        total = forward_backward(job, batch)
        tracker.assign((weight.grad for weight in weights.values()), "gradients")
        take_unjudged(job, batch, total)
        tracker.assign(weights.values(), "weights")
        for weight in weights.values():
            tracker.assign(optimiser.state_of(weight).values(), "optimizer")
    tracker.begin(_BETWEEN)


def _batch(workload: Workload, step: int) -> Any:
    train = workload.config.train
    count = workload.num_microbatches * train.micro_batch_size
    tokens = torch.zeros(count, train.seq_len + 1, dtype=torch.long)
    data = (tokens, torch.zeros(count, dtype=torch.long))
    return Batch(step, data, np.zeros(count, np.int64), workload.global_tokens)


def _name_layer_inputs(model: Any, tracker: _Tracker) -> None:
    """Have the residual stream that enters each block, and the logits, counted as what they are."""
    for part in model.decoders:
        for block in part.blocks.values():
            block.register_forward_pre_hook(lambda _, args: tracker.assign(args[:1], "layer_inputs"))
        if part.head is not None:
            part.head.register_forward_hook(lambda _, args, out: tracker.assign([out], "logits"))


def _moments(history: Sequence[_Change], step: int) -> list[Moment]:
    """Return what is held between steps, and the largest moment of each phase of a step."""
    held, total = dict.fromkeys(CATEGORIES, 0), 0
    largest: dict[str, tuple[int, dict[str, int]]] = {}
    for record, change, name in history:
        held[record.category] += change
        total += change
        if name not in largest or total > largest[name][0]:
            largest[name] = total, dict(held)
    between = Moment(_BETWEEN, largest[_BETWEEN][1])
    phases = (name for name in largest if name.startswith(f"step {step}: "))
    return [between, *(Moment(name.partition(": ")[2], largest[name][1]) for name in phases)]
