"""A rank with a CUDA device that is not there: torch's fake tensors, and stand-ins at the seams below.

Tensors on `cuda:0` are fake: they have a shape, a format and a device, and no values. Tensors on the CPU are
real. torch itself refuses what mixes the two, as on a GPU. Stand-ins, and nothing else, take the place of:

| seam | why | stand-in |
| --- | --- | --- |
| autograd's engine | asks for a device's context | `walked_backward`, the same nodes in Python |
| streams and events | made by the driver | all work is in order; an event took a millisecond |
| reading a value of a fake tensor | there is none | 1 |
| page-locked memory | made by the driver | ordinary host memory |
| collectives | one process | of fake process groups: each rank hears only itself |
| a commit by several ranks | the same; it reads host copies only | left out |
| DDP's reducer | C++ that reads storages | one bucket with all gradients, after the backward pass |
| cuDNN | asks the driver for its version | off: an LSTM takes torch's own CUDA kernels |
| an exchange's futures and threads | know devices; modes are a thread's own | done at once |
| facts about the device | asked of the driver | one GPU with bf16 |
| inference mode | operators arrive whole, so that copies of constants go to the driver | `no_grad` |
| compiled kernels | need a GPU | Dynamo captures the graphs; they run as captured |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shoal.config.sections import Runtime
from shoal.runtime.device import select_device
from shoal.runtime.process import Process, form_groups
from shoal.runtime.rank_info import RankInfo
from tests.rehearse.walked_backward import walked

T = TypeVar("T")
DEVICE = torch.device("cuda", 0)
CAPTURED: set[str] = set()  # operators in the graphs that this rank had compiled
INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=141 << 30,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    warp_size=32,
    gcnArchName="",
    L2_cache_size=50 << 20,
)


class CudaIsFake(TorchDispatchMode):
    """Leaves operators on real CPU tensors as they are, and has all others done by fake tensors."""

    supports_higher_order_operators = True  # attention under a mask of documents is one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have the compiler trace under this mode, where it would leave functions as they are."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            return _communicate(func, args)
        kwargs.pop("pin_memory", None)
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return (args[0].dtype.is_floating_point and 1.0) or args[0].dtype == torch.bool or 1
        if func is torch.ops.aten.record_stream.default:
            return None
        if getattr(func, "overloadpacket", None) in INDEXED:
            _check_indices(func, args[0], args[1])
        if func.name().startswith("aten::_foreach_"):
            _check_list(func, args)
        on_cuda = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if on_cuda or any(isinstance(each, FakeTensor) for each in tree_iter((args, kwargs))):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _check_list(func: Any, args: Any) -> None:
    """Refuse what a GPU refuses and fake tensors let pass: a list of tensors times one on another device."""
    found = {each.device for each in tree_iter(args) if isinstance(each, Tensor)}
    if len(found) > 1:
        raise RuntimeError(f"{func.name()}: tensors on devices {found}")


def _check_indices(func: Any, held: Tensor, indices: list[Tensor | None]) -> None:
    """Refuse what a GPU refuses and fake tensors let pass: indices on the GPU of a tensor on the host."""
    found = {index.device for index in indices if index is not None}
    if found - {held.device, torch.device("cpu")}:
        raise RuntimeError(f"{func.name()}: indices on device {found}, tensor on {held.device}")


def _communicate(func: Any, args: tuple[Any, ...]) -> Any:
    """Let a rank hear itself: what it gathers is its own, what it sums its own part."""
    devices = {each.device for each in tree_iter(args) if isinstance(each, Tensor)}
    assert len(devices) <= 1, f"{func.name()}: tensors on {devices}"
    with unset_fake_temporarily():
        work = FakeWork().boxed()
    if func.name() in ("c10d::allgather_", "c10d::_allgather_base_") and devices == {torch.device("cpu")}:
        for own, everyone in zip(_listed(args[1]), _listed(args[0]), strict=True):
            for one in everyone if isinstance(everyone, list) else everyone.view(-1, *own.shape):
                one.copy_(own)
    return (args[0], work) if len(func._schema.returns) == 2 else work


def _gather_own(everyone: list[Any], own: Any, group: Any = None) -> None:
    everyone[:] = [own] * len(everyone)


def _sum(process: Process, *values: float) -> list[float]:
    """Return what this rank has; a mean is made of the two or three values of an evaluation: none is 0."""
    return [value or 1.0 for value in values] if len(values) in (2, 3) else list(values)


def _gather_first(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    _gather_own(object_gather_list or [], obj)


def _take_first(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None, *_: Any, **__: Any
) -> None:
    assert scatter_object_input_list, "only a world of one scatters objects"
    scatter_object_output_list[0] = scatter_object_input_list[0]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Stream:
    """All work is in order."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = DEVICE
        self.cuda_stream = 0

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """A moment; the next one is a millisecond later."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1.0


_STREAM = Stream()
DRIVER: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "device_count": lambda: 8,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "empty_cache": lambda: None,
    "is_current_stream_capturing": lambda: False,
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device=None: None,
    "Stream": Stream,
    "Event": Event,
    "stream": lambda stream: stream or contextlib.nullcontext(),
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
}


class FakeReplica(nn.Module):
    """DDP as layouts use it: a hook gets all gradients in one bucket when a backward pass is done."""

    def __init__(self, module: nn.Module, device_ids: list[torch.device] | None, **_: Any) -> None:
        super().__init__()
        self.module = module
        assert device_ids == [DEVICE], device_ids
        assert {p.device for p in module.parameters()} == {DEVICE}
        self._sends = True
        self._hook: Callable[[Any, Any], Any] | None = None

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        self._hook = hook

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._sends = False
        try:
            yield
        finally:
            self._sends = True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._sends:
            torch.autograd.Variable._execution_engine.queue_callback(self._send)
        return self.module(*args, **kwargs)

    def _send(self) -> None:
        weights = [weight for weight in self.module.parameters() if weight.grad is not None]
        flat = torch.cat([weight.grad.flatten() for weight in weights])
        parts = flat.split([weight.numel() for weight in weights])
        views = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        for weight, view in zip(weights, views, strict=True):
            weight.grad = view
        bucket = SimpleNamespace(
            index=lambda: 0, buffer=lambda: flat, parameters=lambda: weights, gradients=lambda: views
        )
        assert self._hook is not None
        self._hook(None, bucket)


def _run_as_captured(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile nothing; note the operators of a graph whose tensors are all on the GPU."""
    devices = {each.device for each in inputs if isinstance(each, Tensor)}
    assert devices == {DEVICE}, f"a compiled graph takes tensors on {devices}"
    CAPTURED.update(getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes)
    return graph.forward


class AtOnce:
    """An executor that does its work where it is asked to."""

    def __init__(self, *_: Any) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args))
        return future


class DoneFuture(torch.futures.Future[T]):
    """Knows no device."""

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()


@contextlib.contextmanager
def fake_rank(rank: int = 0, world_size: int = 1) -> Iterator[Process]:
    """Be a rank with a fake GPU, joined to others that are not there."""
    plain_group, compiled = dist.new_group, torch.compile
    torch._dynamo.reset()
    CAPTURED.clear()

    def new_group(ranks: list[int] | None = None, timeout: Any = None, backend: Any = None, **_: Any) -> Any:
        return plain_group(ranks, backend="fake")

    patches = {
        **{f"torch.cuda.{name}": value for name, value in DRIVER.items()},
        "torch.accelerator.synchronize": lambda device=None: None,
        "torch.accelerator.is_available": lambda: True,
        "torch.Tensor.pin_memory": lambda tensor, device=None: tensor,
        "torch.distributed.new_group": new_group,
        "torch.futures.Future": DoneFuture,
        # Else the mode would think that a device is there, as torch.cuda.is_available says.
        "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init": True,
        "torch._subclasses.fake_tensor.init_gpu_context": lambda device: None,
        "torch.distributed.all_gather_object": _gather_own,
        "torch.distributed.gather_object": _gather_first,
        "torch.distributed.scatter_object_list": _take_first,
        "torch.distributed.broadcast_object_list": lambda *_, **__: None,
        "shoal.runtime.process.Process.sum": _sum,
        "shoal.parallel.apply.DistributedDataParallel": FakeReplica,
        "shoal.strategies.compression.ThreadPoolExecutor": AtOnce,
        "shoal.strategies.rounds.in_thread": lambda work: AtOnce().submit(work),
        "torch.compile": lambda function, **options: compiled(function, **options, backend=_run_as_captured),
        "torch._dynamo.config.fail_on_recompile_limit_hit": True,
        "torch._C._InferenceMode": lambda on: torch.no_grad() if on else contextlib.nullcontext(),
    }
    if world_size > 1:
        patches["shoal.checkpoint.store.CheckpointStore._run"] = lambda *_: None
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with contextlib.ExitStack() as stack:
            for name, value in patches.items():
                stack.enter_context(patch(name, value))
            stack.enter_context(walked())
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            runtime = Runtime(device="cuda", threads=1, timeout_s=60)
            info = RankInfo(rank, world_size, rank, world_size)
            process = form_groups(info, select_device("cuda", 0, world_size), runtime)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(CudaIsFake())
            yield process
    finally:
        dist.destroy_process_group()
