"""The exchange that a configuration asks for."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.slow_transport import slowed
from shoal.comm.torch_transport import TorchTransport
from shoal.config.sections import Config, Sync
from shoal.gradsync.carried import Carried
from shoal.gradsync.codecs import Bf16, Int8, OneBit
from shoal.gradsync.exchange import BackEnd, Exchange
from shoal.gradsync.methods import Exact, Method, PowerSGD, TopK, TwoPhase
from shoal.parallel.tensor import local
from shoal.runtime.mesh import Mesh
from shoal.runtime.process import Process

REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def choose_exchange(config: Config, mesh: Mesh, process: Process, named: dict[str, nn.Parameter]) -> Exchange:
    """Make what sums these weights' gradients over the replicas. Collective over the world."""
    dtype, sync = REDUCE_DTYPES[config.precision.reduce_dtype], config.sync
    if mesh.layout.dp_replicate == 1 or (sync.strategy, sync.algorithm) == ("allreduce", "backend"):
        return BackEnd(mesh.group("dp_replicate") if mesh.axes is not None else None, dtype)
    group = mesh.new_group("dp_replicate", "exchange", config.runtime.timeout_s)
    transport = slowed(TorchTransport(group, process.device.torch_device), config.runtime.slow_link)
    if sync.algorithm == "hierarchical":
        transport.hosts = _hosts(group, process)
    parts = {name: local(weight.detach()) for name, weight in named.items()}
    name = f"{sync.strategy} of rank {sync.rank}" if sync.strategy == "powersgd" else sync.strategy
    return Carried(name, transport, method_of(sync, parts, dtype), parts, sync.warmup_steps)


def method_of(sync: Sync, parts: dict[str, Tensor], dtype: torch.dtype) -> Method:
    """Return how a strategy adds up; `parts` are this rank's of each weight, `dtype` is all-reduce's."""
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
    """Return the places of equal names together, those of the first one first."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return list(places.values())
