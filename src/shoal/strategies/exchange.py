"""Choice of the gradient exchange for a strategy, and its state in a checkpoint."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.slow_transport import slowed
from shoal.comm.torch_transport import TorchTransport
from shoal.config.sections import Config, Sync
from shoal.gradsync.exchange import Exchange
from shoal.runtime.mesh import Mesh, local
from shoal.runtime.process import Process
from shoal.strategies.codecs import Bf16, Int8, OneBit
from shoal.strategies.compression import CompressedExchange
from shoal.strategies.feedback_state import FeedbackState
from shoal.strategies.methods import Exact, Method, PowerSGD, TopK, TwoPhase


def make(
    config: Config, mesh: Mesh, process: Process, weights: dict[str, nn.Parameter], dtype: torch.dtype
) -> CompressedExchange:
    """Return the exchange that sums these weights' gradients over replicas. Collective over the world."""
    sync = config.sync
    group = mesh.new_group("dp_replicate", "exchange", config.runtime.timeout_s)
    transport = slowed(TorchTransport(group, process.device.torch_device), config.runtime.slow_link)
    if sync.algorithm == "hierarchical":
        transport.hosts = _hosts(group, process)
    parts = {name: local(weight.detach()) for name, weight in weights.items()}
    name = f"{sync.strategy} of rank {sync.rank}" if sync.strategy == "powersgd" else sync.strategy
    return CompressedExchange(name, transport, method_of(sync, parts, dtype), parts, sync.warmup_steps)


def error_feedback(exchange: Exchange, mesh: Mesh, split: tuple[int, ...]) -> FeedbackState:
    """Return the error feedback of an exchange; `split` is the layers of each pipeline stage."""
    return FeedbackState(exchange, mesh, split)


def method_of(sync: Sync, parts: dict[str, Tensor], dtype: torch.dtype) -> Method:
    """Return the summation method of a strategy.

    `parts` has this rank's part of each weight; `dtype` is the format in which all-reduce sends gradients.
    """
    match sync.strategy:
        case "allreduce":
            return Exact(sync.algorithm, dtype)
        case "bf16":
            return TwoPhase(Bf16())
        case "int8":
            return TwoPhase(Int8(sync.block))
        case "onebit":
            return TwoPhase(OneBit(sync.block, sync.feedback))
        case "topk":
            return TopK(sync.density, sync.feedback)
        case "powersgd":
            return PowerSGD(sync.rank, parts)
    raise AssertionError(f"{sync.strategy} is no exchange of gradients")


def _hosts(group: dist.ProcessGroup, process: Process) -> list[list[int]]:
    """Return the ranks of a group by host. Collective over the world."""
    names = [""] * process.world_size
    dist.all_gather_object(names, socket.gethostname(), group=process.control)
    return by_host(names[rank] for rank in dist.get_process_group_ranks(group))


def by_host(names: Iterable[str]) -> list[list[int]]:
    """Group the indices of equal names, in the order of first appearance."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return list(places.values())
