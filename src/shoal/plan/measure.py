"""Measurements for predictions: the link, the step of a replica, and the computing time of strategies."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.bench.collectives import time_all_reduce
from shoal.comm.all_reduce import all_reduce
from shoal.comm.collectives import barrier
from shoal.comm.silent_transport import SilentTransport
from shoal.comm.transport import Transport
from shoal.config.rules import grad_accum_steps
from shoal.config.sections import Config, Sync
from shoal.config.sync_rules import STRATEGIES
from shoal.errors import InputError
from shoal.gradsync.exchange import Bucket
from shoal.models.decoder import Decoder
from shoal.models.init import initialise
from shoal.models.loss import CrossEntropy
from shoal.plan.link_cost import Cost, Link, all_reduce_cost, fit_link
from shoal.plan.sync_cost import ComputeTime, Shapes
from shoal.strategies import async_sgd
from shoal.strategies.codecs import Int8, Plain
from shoal.strategies.compression import CompressedExchange
from shoal.strategies.exchange import method_of
from shoal.strategies.outer import average, mix, outer_sgd, pack, unpack
from shoal.strategies.owners import Owners, share_out
from shoal.tasks.choose import open_task
from shoal.tasks.task import Task
from shoal.train.metrics import read_metrics
from shoal.train.optimiser import build_optimiser
from shoal.train.precision import Precision

_LINK_BYTES = tuple(1 << power for power in range(10, 28, 2))  # 1 KB to 64 MB
_REPEATS = 5
_TICK_S = 1e-9
_STEPS = 3  # timed, after one warm-up
_BUCKET_BYTES = 25 << 20  # as DDP's
_MOST_ELEMENTS = 16 << 20  # part of a model to time a strategy's work on; the whole takes in proportion
_BACKWARD = 0.6  # fraction of a step, if only its whole time is known


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure."""

    link_s: float  # seconds for the link; 0: the link is known
    config: Config | None  # model whose steps to time; None: their time is known
    replicas: int  # planned number, over which a step's samples are divided
    syncs: tuple[Sync, ...]  # settings of the strategies to time
    shapes: dict[str, tuple[int, ...]]  # of the weights


@dataclass(frozen=True)
class Measurement:
    """Results of the slowest rank."""

    ranks: int
    hosts: int
    link: Link | None
    compute_time: ComputeTime | None
    work_s: dict[str, float]  # of a step, by strategy


def measure(transport: Transport, tell: Callable[[str], None], options: MeasureOptions) -> Measurement:
    """Measure on all ranks at the same time. Collective over the transport's ranks."""
    link = compute_time = None
    if options.link_s:
        tell(f"the link between {transport.size} ranks, up to {options.link_s:g} s")
        link = measure_link(transport, options.link_s)
    if options.config is not None:
        tell("steps of a replica")
        compute_time = ComputeTime(
            *_slowest(transport, _time_steps(transport, options.config, options.replicas))
        )
    work_s: dict[str, float] = {}
    for sync in options.syncs:
        tell(f"the work of {sync.strategy}")
        barrier(transport)
        silent = SilentTransport(0, options.replicas, transport.device)
        work_s[sync.strategy] = _slowest(transport, [time_work(sync, options.shapes, silent)])[0]
    return Measurement(transport.size, len(transport.hosts), link, compute_time, work_s)


def measure_link(transport: Transport, limit_s: float) -> Link | None:
    """Time all-reduces of growing size for some seconds; return the fitted link."""
    spent, last = 0.0, 0.0
    costs: list[Cost] = []
    times: list[float] = []
    for num_bytes in _LINK_BYTES:
        if costs and spent + 4 * 2 * last > limit_s:  # one warm-up, one that counts
            break
        tensor = torch.zeros(num_bytes // 4, device=transport.device)
        last = time_all_reduce(transport, "chunked_ring", tensor)
        spent += last
        repeats = max(1, min(_REPEATS, int((limit_s - spent) / (4 * last))))
        samples = [time_all_reduce(transport, "chunked_ring", tensor) for _ in range(repeats)]
        last = statistics.median(samples)
        spent += sum(samples)
        costs.append(all_reduce_cost("chunked_ring", transport.size, num_bytes))
        times.append(last)
    return sustained(costs, times)


def sustained(costs: Sequence[Cost], seconds: Sequence[float]) -> Link | None:
    """Fit a link to times, with a bandwidth of at most that of the last transfer, the largest.

    On networks with a token bucket, which training exhausts, smaller transfers may pass without delay.
    """
    link = fit_link(costs, seconds)
    if link is None:
        return None
    moving_s = max(seconds[-1] - costs[-1].num_rounds * link.latency_s, _TICK_S)
    return replace(link, bytes_per_s=min(link.bytes_per_s, costs[-1].num_bytes / moving_s))


def _slowest(transport: Transport, seconds: Sequence[float]) -> list[float]:
    """Return the maximum of each number over all ranks. Collective over all ranks."""
    tensor = torch.tensor(seconds, dtype=torch.float64, device=transport.device)
    all_reduce(transport, tensor, "maximum", "tree")
    return [float(value) for value in tensor.tolist()]


def _time_steps(transport: Transport, config: Config, replicas: int) -> tuple[float, float]:
    """Train one replica alone with its share of the batch; return the seconds of a step and of its last
    backward pass.
    """
    device = transport.device
    task = open_task(config)
    precision = Precision(config.precision, device)
    task.begin(transport.rank % replicas, replicas, 1, device, precision.autocast, CrossEntropy())
    model = _make(task, config).to_empty(device=device)
    initialise(model, config.train.seed)
    optimiser = build_optimiser(dict(model.named_weights()), config.optimizer)
    samples = []
    for step in range(1, _STEPS + 2):
        batch = task.batch(step)
        for weight in model.parameters():
            weight.grad = None
        barrier(transport)
        began = time.perf_counter()
        for micro in task.micro_batches(batch):
            loss = task.forward_loss(model, micro)
            transport.synchronise()
            before_backward = time.perf_counter()
            (loss / batch.global_targets).backward()
        transport.synchronise()
        backward_s = time.perf_counter() - before_backward
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip or math.inf)
        optimiser.step(config.optimizer.lr)
        transport.synchronise()
        samples.append((time.perf_counter() - began, backward_s))
    task.close()
    steps, backwards = zip(*samples[1:], strict=True)
    return statistics.median(steps), statistics.median(backwards)


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a configuration's model, in model order."""
    task = open_task(config)
    return {name: tuple(weight.shape) for name, weight in _make(task, config).named_weights().items()}


def _make(task: Task[Any, Any], config: Config) -> Any:
    """Return the whole model on the meta device."""
    with torch.device("meta"):
        (model,) = task.parts([range(task.shape.n_layers if task.shape else 1)])
    if isinstance(model, Decoder):
        train = config.train
        model.set_recompute(train.recompute, train.recompute_layers, offload=train.recompute_offload)
    return model


@torch.no_grad()
def time_work(sync: Sync, shapes: Shapes, transport: Transport) -> float:
    """Return the computing time of a strategy for a step, in seconds, on a transport that sends nothing.

    For a large model, a part of it is measured and the time scaled in proportion.
    """
    if (sync.strategy, sync.algorithm) == ("allreduce", "backend"):
        return 0.0  # the measured link includes the time to add
    weights: dict[str, Tensor] = {}
    total = taken = 0
    for name, shape in shapes.items():
        total += torch.Size(shape).numel()
        if not weights or total <= _MOST_ELEMENTS:
            weights[name] = torch.randn(*shape, device=transport.device)
            taken += weights[name].numel()
    kinds = {"exchange": _exchange, "owner": _owners, "outer": _outer, "asynchronous": _asynchronous}
    act = kinds[STRATEGIES[sync.strategy].kind](sync, weights, transport)
    samples = []
    for _ in range(_STEPS + 1):
        began = time.perf_counter()
        act()
        transport.synchronise()
        samples.append(time.perf_counter() - began)
    every = sync.every if STRATEGIES[sync.strategy].kind == "outer" else 1
    return statistics.median(samples[1:]) * total / taken / every


def _exchange(sync: Sync, weights: dict[str, Tensor], transport: Transport) -> Callable[[], None]:
    """Return the work of summing gradients."""
    exchange = CompressedExchange(sync.strategy, transport, method_of(sync, weights, torch.float32), weights)
    buckets = list(_buckets(weights))

    def act() -> None:
        exchange.begin(1, 1.0)
        for handle in [exchange.start(bucket) for bucket in buckets]:
            handle.wait()
        exchange.end(applied=True)

    return act


def _buckets(weights: dict[str, Tensor]) -> Iterator[Bucket]:
    """Put tensors into buckets as DDP does, with values that are not zero."""
    names: list[str] = []
    filled = 0
    for number, (name, tensor) in enumerate(weights.items(), start=1):
        names.append(name)
        filled += tensor.numel()
        if 4 * filled >= _BUCKET_BYTES or number == len(weights):
            flat = torch.randn(filled, device=tensor.device)
            parts = flat.split([weights[name].numel() for name in names])
            views = {name: part.view_as(weights[name]) for name, part in zip(names, parts, strict=True)}
            yield Bucket(number, flat, views)
            names, filled = [], 0


def _owners(sync: Sync, weights: dict[str, Tensor], transport: Transport) -> Callable[[], None]:
    """Return the work of rank 0 besides the optimiser step."""
    named = {name: nn.Parameter(tensor) for name, tensor in weights.items()}
    owners = Owners(named, sync.strategy, transport, torch.float32)

    def act() -> None:
        owners.run()
        owners.after_step(1)

    return act


def _outer(sync: Sync, weights: dict[str, Tensor], transport: Transport) -> Callable[[], None]:
    """Return the work of a replica in an exchange of the whole model."""
    anchors = [tensor.clone() for tensor in weights.values()]
    momenta = [torch.zeros_like(tensor) for tensor in anchors]
    sgd, codec = outer_sgd(sync, transport.size), Int8(sync.block) if sync.int8 else Plain(torch.float32)
    host = SilentTransport(transport.rank, transport.size)  # transfers are from host memory

    def act() -> None:
        moved = [anchor - weight for anchor, weight in zip(anchors, weights.values(), strict=True)]
        mean = unpack(average(host, pack(moved, codec), codec), anchors, codec)
        for weight, anchor, momentum, gradient in zip(weights.values(), anchors, momenta, mean, strict=True):
            sgd.step(anchor, momentum if sgd.momentum else None, gradient)
            mix(weight, anchor, 0)

    return act


def _asynchronous(sync: Sync, weights: dict[str, Tensor], transport: Transport) -> Callable[[], None]:
    """Return the work of a worker and its server in a step, besides optimiser steps."""
    named = {name: nn.Parameter(tensor) for name, tensor in weights.items()}
    like, size = list(named.values()), transport.size
    shares = share_out(named, size)
    still = async_sgd.Update(lambda rate: None, dict)
    server = async_sgd.Server(
        shares[transport.rank], lambda share: still, size, async_sgd.StalenessBound(1, 0, 0)
    )

    def act() -> None:
        flats = [async_sgd.pack(share.values(), like) for share in shares]  # gradients out, then weights in
        for worker in range(size):
            server.take(worker, 1, 0.0, flats[transport.rank])
        for share, flat in zip(shares, flats, strict=True):
            async_sgd.fill(list(share.values()), flat)

    return act


def compute_time_of_run(run_dir: Path, config: Config, replicas: int) -> ComputeTime:
    """Return the compute time of a run, scaled to a replica's share of the batch for this many replicas.

    Raises:
        InputError: The run has no recorded step.
    """
    file = run_dir / "metrics.jsonl"
    lines = [line for line in read_metrics(file) if "seconds" in line] if file.is_file() else []
    if not lines:
        raise InputError(f"{run_dir}: no step is recorded in metrics.jsonl", hint="train some steps first")
    lines = lines[min(5, len(lines) // 2) :]  # the first ones warm up
    step_s = statistics.median(line["seconds"] - line["communication_s"] for line in lines)
    backward_s = statistics.median(line["backward_s"] for line in lines)
    share = ranks_of_run(run_dir) / replicas
    return ComputeTime(step_s * share, backward_s * share / max(1, grad_accum_steps(config, replicas)))


def ranks_of_run(run_dir: Path) -> int:
    """Return the number of ranks of a run."""
    patterns = ("ranks/rank-*", "replicas/*/ranks/rank-*")  # of the first replica group
    return max(1, sum(len(list(run_dir.glob(pattern))) for pattern in patterns))


def compute_time_of_step(step_s: float, config: Config, replicas: int) -> ComputeTime:
    """Return the compute time from the time of a step without communication."""
    return ComputeTime(step_s, _BACKWARD * step_s / max(1, grad_accum_steps(config, replicas)))
