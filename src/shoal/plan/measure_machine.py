"""`shoal plan --measure`: the rates of this machine, in two minutes, in place of the hardware table's.

Each kernel is timed at several sizes, forward and backward, in processes that are set up as those of
`shoal train`: first in one, then in two at the same time, which share memory and caches as replicas do.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shoal.bench.ceilings import repeat
from shoal.bench.ranks import on_ranks
from shoal.comm.collectives import barrier, broadcast
from shoal.comm.transport import Transport
from shoal.config.sections import Model, Optimizer, Runtime
from shoal.models.decoder import Block, Context, rotate
from shoal.models.loss import CrossEntropy
from shoal.models.recompute import run_in_chunks
from shoal.models.shape import resolve_shape
from shoal.parallel.tensor import Axis
from shoal.plan.link_cost import Link, all_reduce_cost, collective_cost, fit_link
from shoal.plan.machine import Machine, save_machine
from shoal.plan.rates import BACKWARD, COLLECTIVES, Law
from shoal.runtime.allocator import keep_memory, physical_memory
from shoal.runtime.cores import logical_cores
from shoal.runtime.device import Device, has_fast_products, select_device
from shoal.train.optimiser import build_optimiser

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COPIES = {"cpu": 12, "cuda": 1}  # of the tensors of a case, in turns: a CPU's caches do not hold all
_SCALE = {"cpu": 1, "cuda": 16}  # of the tokens of each case: a GPU's products are larger
_PRODUCTS = (  # tokens, inputs, outputs
    (512, 64, 64),
    (512, 128, 512),
    (1024, 128, 128),
    (1024, 512, 128),
    (2048, 256, 256),
    (2048, 256, 1024),
    (2048, 1024, 256),
    (2048, 512, 512),
    (1024, 768, 768),
    (1024, 768, 3072),
    (2048, 256, 3072),
    (256, 512, 16384),
)
_ATTENTION = ((16, 4, 64, 32), (8, 4, 256, 64), (2, 8, 512, 64), (1, 12, 1024, 64))  # b, heads, time, width
_ELEMENTS = (1 << 16, 1 << 19, 1 << 21)
_WIDTH = 256  # of the rows of norms
_LOGITS = ((512, 512), (1024, 3072), (128, 50304))
_UPDATED = ((1 << 20, 128), (1 << 22, 64), (1 << 24, 16))  # parameters, more than a cache holds, in tensors
_EXCHANGED = (1 << 18, 1 << 20, 1 << 22)  # bytes
_TICK_S = 1e-6
_BESIDE = 4  # layers
_COPIED_BYTES, _COPYING_S = 64 << 20, 0.5
_BUCKET = 4 << 20  # numbers that are exchanged while layers are computed
_NOTHING = Context(None, None, None, None)  # beside its input, that a layer needs
_TRIMMED = 0.1  # of the samples, at either end


_Act = Callable[[], Any]
_Row = tuple[float, float, float, float]  # operations, bytes, calls, seconds


@dataclass(frozen=True)
class _Case:
    """A call, with the operations and bytes by which plan.step_time counts it."""

    kernel: str
    flops: float
    num_bytes: float
    calls: float
    act: Callable[[], Any]
    leaves: Sequence[Tensor] = ()  # with them, its backward pass is timed as well
    back_bytes: float = 0.0
    back_flops: float = 0.0


def measure(seconds: float = 120.0, folder: Path | None = None) -> Machine:
    """Measure this machine, store the rates and return them."""
    device = select_device("auto", 0, 1)
    count = torch.cuda.device_count() if device.is_cuda else logical_cores()
    runtime = Runtime()
    laws, links, overlap = {}, {}, 0.0
    runs = [1, 2] if count > 1 else [1]
    for processes in runs:
        found = on_ranks(processes, "torch", _measure, seconds / len(runs), runtime=runtime)
        laws[str(processes)], links, overlap = found
    memory = torch.cuda.get_device_properties(0).total_memory if device.is_cuda else physical_memory()
    kind = "cuda" if device.is_cuda else "cpu"
    host = host_copies(device) if device.is_cuda else 0.0
    machine = Machine(device.name, kind, count, memory, laws, links, overlap, host)  # type: ignore[arg-type]
    save_machine(machine, folder)
    return machine


def host_copies(on: Device) -> float:
    """Return the bytes a second of a copy between host memory, page-locked for a GPU, and the device."""
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=on.is_cuda)
    here = torch.empty_like(there, device=on.torch_device)
    return _COPIED_BYTES / statistics.median(repeat(lambda: here.copy_(there), on, _COPYING_S))


def _measure(
    transport: Transport, tell: Callable[[str], None], seconds: float
) -> tuple[dict[str, dict[str, Law]], dict[str, Link], float]:
    """Measure on each rank at the same time; return rank 0's laws, the links, and the overlap. Collective."""
    if transport.device.type == "cpu":
        keep_memory()
    on = select_device(transport.device.type, transport.rank, transport.size)
    dtypes = {name: dtype for name, dtype in _DTYPES.items() if has_fast_products(dtype, transport.device)}
    for_links = seconds / 3 if transport.size > 1 else 0.0
    laws = {}
    for name, dtype in dtypes.items():
        tell(f"kernels in {name}, {transport.size} at a time")
        laws[name] = _laws(transport, on, dtype, (seconds - for_links) / len(dtypes))
    if not for_links:
        return laws, {}, 0.0
    tell("exchanges between two processes")
    links = _links(transport, on, for_links * 0.7)
    return laws, links, _overlap(transport, on, links["all_reduce"], for_links * 0.3)


def _laws(transport: Transport, on: Device, dtype: torch.dtype, seconds: float) -> dict[str, Law]:
    """Return the law of each kernel."""
    device = on.torch_device
    rows: dict[str, list[_Row]] = {}
    # A backward pass has its forward pass before it.
    each_s = seconds / sum(3 if case.leaves else 1 for case in (*_cases(device, dtype), *_updates(device)))
    alike = zip(*(_cases(device, dtype) for _ in range(_COPIES[device.type])), strict=True)
    for copies in itertools.chain(alike, ((case,) for case in _updates(device))):
        barrier(transport)
        case = copies[0]
        with torch.set_grad_enabled(bool(case.leaves)):
            case.act()
            took = _mean(repeat(_turns(copies), on, each_s))
            rows.setdefault(case.kernel, []).append((case.flops, case.num_bytes, case.calls, took))
            if not case.leaves:
                continue
            took = _mean(_backward(copies, on, each_s))
        flops = case.back_flops or 2 * case.flops
        calls = case.calls if case.kernel.startswith("layer") else 2 * case.calls
        row = (flops, case.back_bytes or 2 * case.num_bytes, calls, took)
        rows.setdefault(case.kernel + BACKWARD, []).append(row)
    return {kernel: fit_law(found) for kernel, found in rows.items()}


def _in_turn(first: _Act, second: _Act) -> None:
    first()
    second()


def _turns(copies: Sequence[_Case]) -> _Act:
    """Return what makes the next of some calls, whose results lie in other memory than the last ones."""
    turns, kept = itertools.cycle(copies), deque[Any](maxlen=len(copies))
    return lambda: kept.append(next(turns).act())


def _backward(copies: Sequence[_Case], on: Device, seconds: float) -> list[float]:
    """Return the seconds of the backward pass of each call; adding up gradients is not part of it.

    It begins when all other calls were made, as the layers of a model are.
    """
    turns, waiting = itertools.cycle(copies), deque[tuple[_Case, Tensor]]()
    samples: list[float] = []
    until = time.perf_counter() + 2 * seconds
    while len(samples) < 3 or (time.perf_counter() < until and len(samples) < 300):
        case = next(turns)
        waiting.append((case, case.act()))
        if len(waiting) < len(copies):
            continue
        case, y = waiting.popleft()
        gradient = torch.ones_like(y)
        on.synchronise()
        began = time.perf_counter()
        torch.autograd.grad(y, case.leaves, gradient)
        on.synchronise()
        samples.append(time.perf_counter() - began)
    return samples


def fit_law(rows: Sequence[_Row]) -> Law:
    """Fit seconds of an operation, a byte and a call, none below 0, to (flops, bytes, calls, seconds).

    By relative least squares; of the subsets of the three terms, the best without a negative one.
    """
    best, law = float("inf"), Law(0.0, 0.0, 0.0)
    sides = np.array([[value / row[3] for value in row[:3]] for row in rows])
    for size in (1, 2, 3):
        for terms in itertools.combinations(range(3), size):
            columns = sides[:, terms]
            if not columns.any(axis=0).all() or len(rows) < size:
                continue
            found, *_ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)
            residual = float(((columns @ found - 1) ** 2).sum())
            if (found >= 0).all() and residual < best:
                best, values = residual, [0.0, 0.0, 0.0]
                for term, value in zip(terms, found, strict=True):
                    values[term] = float(value)
                law = Law(*values)
    return law


def _links(transport: Transport, on: Device, seconds: float) -> dict[str, Link]:
    """Return a link for each collective along tp, with the copies around it. Collective."""
    axis = Axis(init_device_mesh(transport.device.type, (transport.size,)), lambda _: nullcontext())
    size, compute, links = transport.size, _layers(on, 1), {}
    for name in COLLECTIVES:
        costs, times = [], []
        for num_bytes in _EXCHANGED:
            whole = torch.zeros(size, num_bytes // 4 // size, device=transport.device)
            exchange = functools.partial(getattr(axis, name), whole[0] if name == "all_gather" else whole)
            both = functools.partial(_in_turn, compute, exchange)
            times.append(_added(transport, on, compute, both, seconds / len(COLLECTIVES) / len(_EXCHANGED)))
            own = num_bytes / size if name == "all_gather" else num_bytes
            costs.append(
                all_reduce_cost("chunked_ring", size, own)
                if name == "all_reduce"
                else collective_cost(name, size, own)
            )
        # Where noise made small tensors slower than large ones, the largest speaks for all.
        links[name] = fit_link(costs, times) or Link(0.0, costs[-1].num_bytes / times[-1])
    return links


def _added(transport: Transport, on: Device, compute: _Act, with_exchange: _Act, seconds: float) -> float:
    """Return what an exchange adds to the time of computing, on rank 0. Collective.

    In a step, ranks come to an exchange at different times, and its tensors are not in a cache: that takes
    longer than one exchange after another. What is less than the standard error is lost in noise.
    """
    with_exchange()
    added: list[float] = []
    until = time.perf_counter() + seconds
    while _goes_on(transport, len(added) < 3 or time.perf_counter() < until):
        barrier(transport)
        alone = _once(compute, on)
        added.append(_once(with_exchange, on) - alone)
    error = statistics.stdev(added) / math.sqrt(len(added))
    found = torch.tensor([max(_TICK_S, error, _mean(added))], device=transport.device)
    broadcast(transport, found, 0)
    return found.item()


def _layers(on: Device, count: int) -> _Act:
    """Return the computing beside exchanges: layers, after which ranks are as far apart as in a step."""
    shape = resolve_shape(Model(n_layers=1, d_model=256, n_heads=4, max_seq_len=256), 128)
    block = Block(shape, 0).to(on.torch_device)
    x = torch.randn(4 * _SCALE[on.torch_device.type], 256, 256, device=on.torch_device)

    def act() -> None:
        with torch.no_grad():
            for _ in range(count):
                block(x, _NOTHING)

    return act


def _mean(samples: Sequence[float]) -> float:
    """Return the mean without the ends: a step adds up many calls, so that the median is too short."""
    ends = int(_TRIMMED * len(samples))
    return statistics.fmean(sorted(samples)[ends : len(samples) - ends])


def _goes_on(transport: Transport, wish: bool) -> bool:
    """Return rank 0's wish on all ranks. Collective."""
    wishes = torch.tensor([float(wish)], device=transport.device)
    broadcast(transport, wishes, 0)
    return bool(wishes.item())


def _overlap(transport: Transport, on: Device, link: Link, seconds: float) -> float:
    """Return the part of an exchange that computing beside it hides. Collective."""
    buffer, compute = torch.zeros(_BUCKET, device=on.torch_device), _layers(on, _BESIDE)

    def beside() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        compute()
        if work is not None:
            work.wait()

    after = all_reduce_cost("chunked_ring", transport.size, 4 * _BUCKET).seconds(link)
    return min(1.0, max(0.0, 1 - _added(transport, on, compute, beside, seconds) / after))


def _once(act: Callable[[], Any], on: Device) -> float:
    on.synchronise()
    began = time.perf_counter()
    act()
    on.synchronise()
    return time.perf_counter() - began


def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[_Case]:
    """Yield the calls to time, with the counts of plan.step_time."""
    value, scale = torch.finfo(dtype).bits // 8, _SCALE[device.type]

    def made(*sizes: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(*sizes, device=device).to(like).requires_grad_()

    for tokens, inputs, outputs in _PRODUCTS:
        n = tokens * scale
        leaves = made(n, inputs), made(outputs, inputs), made(outputs)
        moved = value * (n * (inputs + outputs) + inputs * outputs)
        yield _Case("product", 2 * n * inputs * outputs, moved, 1, _call(F.linear, *leaves), leaves)
    for batch, heads, length, width in _ATTENTION:
        q, k, v = (made(batch * scale, heads, length, width) for _ in range(3))
        n = batch * scale * heads * length * width
        attend = _call(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        flops = 2 * n * length
        yield _Case("attention", flops, 4 * n * value, 1, attend, (q, k, v), back_flops=2.5 * flops)
    for elements in (count * scale for count in _ELEMENTS):
        yield from _pointwise(device, dtype, value, elements, made)
    for rows, vocabulary in _LOGITS:
        yield _loss(device, rows * scale, vocabulary, value, made)
    if device.type == "cpu":
        yield from (_layer(dtype, recompute) for recompute in ("none", "selective", "full"))


def _updates(device: torch.device) -> Iterator[_Case]:
    """Yield the optimiser's calls."""
    for parameters, tensors in _UPDATED:
        yield _optimiser(device, parameters * _SCALE[device.type], tensors)


def _pointwise(
    device: torch.device, dtype: torch.dtype, value: int, n: int, made: Callable[..., Tensor]
) -> Iterator[_Case]:
    """Yield the memory-bound kernels of a block on `n` values; the residual stream is in fp32."""
    stream = made(n // _WIDTH, _WIDTH, like=torch.float32)
    there = n * (8 + (4 + value if value < 4 else 0))  # the second term is the cast
    x, y = made(n), made(n)
    norm = nn.LayerNorm(_WIDTH, device=device)
    turns = torch.randn(2, 1, 1, 64, 32, device=device)
    heads = made(max(1, n // 4096), 1, 64, 64)
    yield _Case(
        "norm",
        0,
        there,
        1,
        lambda: norm(stream).to(dtype),
        (stream, *norm.parameters()),
        there + 8 * n,
    )
    yield _Case("gelu", 0, 2 * n * value, 1, _call(F.gelu, x, approximate="tanh"), (x,), 3 * n * value)
    yield _Case("swiglu", 0, 5 * n * value, 2, lambda: F.silu(x) * y, (x, y), 8 * n * value)
    plain, flat = stream.detach().flatten(), x.detach()
    yield _Case("add", 0, n * (8 + value), 1, lambda: plain + flat)
    yield _Case("add" + BACKWARD, 0, n * 12, 1, lambda: plain + plain)
    turned = 8 * heads.numel() * value
    yield _Case("rotate", 0, turned, 8, lambda: rotate(heads, *turns), (heads,), turned)
    copy = torch.empty_like(plain)
    yield _Case("memory", 0, 8 * n, 1, lambda: copy.copy_(plain))


def _loss(device: torch.device, rows: int, vocabulary: int, value: int, made: Callable[..., Tensor]) -> _Case:
    """Return the cross entropy, whose backward pass overwrites the logits, here with small numbers again."""
    logits, entropy = made(rows, vocabulary), CrossEntropy()
    targets = torch.randint(vocabulary, (rows,), device=device)
    n, fused = rows * vocabulary, device.type == "cuda"
    there, back = (value, 2 * value) if fused else (value + 12, 2 * value + 24)
    return _Case("loss", 0, there * n, 1, lambda: entropy(logits, targets), (logits,), back * n)


def _layer(dtype: torch.dtype, recompute: str) -> _Case:
    """Return a layer of so few values that its time is Python's and autograd's."""
    shape = resolve_shape(Model(n_layers=1, d_model=32, n_heads=2, max_seq_len=8), 128)
    block, x = Block(shape, 0), torch.randn(1, 1, 32, requires_grad=True)
    block.recompute = recompute == "selective"

    def act() -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return run_in_chunks([lambda x: block(x, _NOTHING)], x, int(recompute == "full"))

    return _Case(f"layer {recompute}", 0, 0, 1, act, (x, *block.parameters()))


def _optimiser(device: torch.device, count: int, tensors: int) -> _Case:
    """Return what a step does with gradients and weights: forget, norm, clip, update."""
    rows = count // tensors // 4
    weights = {f"w{n}": nn.Parameter(torch.randn(rows, 4, device=device)) for n in range(tensors)}
    optimiser = build_optimiser(weights, Optimizer())
    gradients = [torch.randn_like(weight) for weight in weights.values()]
    for weight, gradient in zip(weights.values(), gradients, strict=True):
        weight.grad = gradient

    def act() -> None:
        torch._foreach_norm(gradients)
        torch._foreach_mul_(gradients, 1.0)
        torch._foreach_mul_(gradients, 1.0)  # in place of setting them to 0, which moves half as much
        optimiser.step(1e-5)

    return _Case("optimiser", 0, (28 + 16 + 4) * count, tensors, act)


def _call(function: Callable[..., Tensor], *arguments: Any, **named: Any) -> Callable[[], Tensor]:
    return lambda: function(*arguments, **named)
