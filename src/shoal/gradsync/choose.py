"""Choice of the synchronisation strategy; modules of strategies are loaded only when selected."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import nn

from shoal.config.sections import Config
from shoal.config.sync_rules import strategy_of
from shoal.gradsync.exchange import BackEnd, Exchange
from shoal.gradsync.replicas import Replica, SynchronousReplicas, WeightOwners
from shoal.runtime.mesh import Mesh
from shoal.runtime.process import Process

REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The module of each kind of strategy. The functions below call its `make`.
_MODULES = {
    "exchange": "shoal.strategies.exchange",
    "owner": "shoal.strategies.owners",
    "outer": "shoal.strategies.rounds",
    "asynchronous": "shoal.strategies.async_sgd",
}


def _module(config: Config) -> Any:
    return importlib.import_module(_MODULES[strategy_of(config).kind])


def make_exchange(config: Config, mesh: Mesh, process: Process, weights: dict[str, nn.Parameter]) -> Exchange:
    """Return the exchange that sums these weights' gradients over replicas. Collective over the world."""
    dtype = REDUCE_DTYPES[config.precision.reduce_dtype]
    plain = (config.sync.strategy, config.sync.algorithm) == ("allreduce", "backend")
    if strategy_of(config).kind != "exchange" or mesh.layout.dp_replicate == 1 or plain:
        group = mesh.group("dp_replicate") if mesh.axes is not None else None
        return BackEnd(group, dtype)
    return cast(Exchange, _module(config).make(config, mesh, process, weights, dtype))


def make_owners(config: Config, process: Process, weights: dict[str, nn.Parameter]) -> WeightOwners | None:
    """Return the owners of a replica's weights, or None if each rank updates its own. Collective."""
    if strategy_of(config).kind != "owner":
        return None
    dtype = REDUCE_DTYPES[config.precision.reduce_dtype]
    return cast(WeightOwners, _module(config).make(config, process, weights, dtype))


def make_replicas(replica: Replica, exchange: Exchange, mesh: Mesh) -> SynchronousReplicas:
    """Return the work of replicas after a step. Replica groups connect to the launcher's store."""
    config = replica.config
    if strategy_of(config).apart:
        return cast(SynchronousReplicas, _module(config).make(replica))
    if isinstance(exchange, BackEnd):
        return SynchronousReplicas()
    return cast(SynchronousReplicas, _module(config).error_feedback(exchange, mesh, config.parallel.split))
