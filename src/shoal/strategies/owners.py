"""Owners of weights: one rank sums the gradients of a weight, keeps its optimiser state, and sends it to all.

| sync.strategy | owner | gradients to the owner | weights from it | as in |
| --- | --- | --- | --- | --- |
| central_serial | rank 0 | one rank after another, one thread sums | one after another | TensorFlow |
| central_parallel | rank 0 | from all ranks at once, all cores sum | to all at once | Torch7 |
| device_sharded | each rank, of its share | in a ring | in a ring | MXNet |
| tree_update | rank 0 | by a tree: 1 to 0 and 3 to 2, then 2 to 0 | by the same tree | Caffe |

The frameworks are those of 2016. Bytes that rank r of n sends, for weights of S bytes of which r owns S(r):

| sync.strategy | gradients | weights |
| --- | --- | --- |
| central_serial, central_parallel | S, rank 0 nothing | rank 0 (n - 1) S, others nothing |
| device_sharded | S - S(r) | S - S(r + 1) |
| tree_update | S, rank 0 nothing | S to each rank below r in the tree |

The central strategies sum in host memory, the others on the device. The update runs on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.collectives import all_gather, broadcast, reduce, reduce_scatter
from shoal.comm.slow_transport import slowed
from shoal.comm.torch_transport import TorchTransport
from shoal.comm.transport import Transport
from shoal.config.sections import Config
from shoal.config.sync_rules import BUCKET_BYTES
from shoal.gradsync.replicas import WeightOwners
from shoal.runtime.cores import physical_cores
from shoal.runtime.flight_recorder import label
from shoal.runtime.process import Process

_ALIGNED = 16  # elements: 64 bytes of fp32, an alignment that suits kernels
Transfer = Callable[[Transport, list[Tensor]], None]  # gets one flat tensor for each owner


class Owners(WeightOwners):
    """Owners of all weights. The weights of an owner form one flat tensor, and so do their gradients."""

    def __init__(
        self, weights: dict[str, nn.Parameter], strategy: str, transport: Transport, dtype: torch.dtype
    ) -> None:
        """Move weights, the same on all ranks, into flat tensors; gradients are sent as `dtype`."""
        self._way = _WAYS[strategy]
        self.transport = transport
        self.traffic = transport.traffic
        self._dtype = dtype
        self.shares = share_out(weights, transport.size) if self._way.shared else [weights]
        self.shares += [{} for _ in range(transport.size - len(self.shares))]
        like = next(iter(weights.values())).detach()
        self._weights = [_flatten(share, like) for share in self.shares]
        self._gradients = [torch.zeros_like(flat) for flat in self._weights]
        for share, flat in zip(self.shares, self._gradients, strict=True):
            for weight, gradient in zip(share.values(), _views(share, flat), strict=True):
                weight.grad = gradient

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """The weights that this rank updates."""
        return self.shares[self.transport.rank]

    @torch.no_grad()
    def run(self) -> None:
        """Sum each gradient on its owner; on other ranks it is then undefined. Collective over all ranks."""
        flats = [flat.to(self.transport.device, self._dtype) for flat in self._gradients]
        self._way.collect(self.transport, flats)
        rank = self.transport.rank
        self._gradients[rank].copy_(flats[rank])  # a no-op if it is the same tensor

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Send each owner's weights to all ranks. Collective over all ranks."""
        flats = [self._on_transport_device(flat, owner) for owner, flat in enumerate(self._weights)]
        self._way.spread(self.transport, flats)
        for flat, arrived in zip(self._weights, flats, strict=True):
            flat.copy_(arrived)

    def _on_transport_device(self, flat: Tensor, owner: int) -> Tensor:
        """Return weights on the device of the transport, uninitialised if they will be overwritten."""
        if owner == self.transport.rank or flat.device == self.transport.device:
            return flat.to(self.transport.device)
        return torch.empty_like(flat, device=self.transport.device)


def share_out(weights: dict[str, nn.Parameter], num_ranks: int) -> list[dict[str, nn.Parameter]]:
    """Assign weights to ranks, largest first, each to the rank with the fewest elements so far.

    Weights stay whole, because Muon's update needs whole matrices, and checkpoints name optimiser state by
    weight. One share is therefore at least as large as the largest weight, often the embedding.
    """
    shares: list[dict[str, nn.Parameter]] = [{} for _ in range(num_ranks)]
    filled = [0] * num_ranks
    for name, weight in sorted(weights.items(), key=lambda item: (-item[1].numel(), item[0])):
        rank = filled.index(min(filled))
        filled[rank] += weight.numel()
        shares[rank][name] = weight
    return shares


def make(config: Config, process: Process, weights: dict[str, nn.Parameter], dtype: torch.dtype) -> Owners:
    """Return the owners of a replica's weights, with a process group of their own. Collective."""
    strategy, runtime = config.sync.strategy, config.runtime
    on_host = _WAYS[strategy].on_host
    group = dist.new_group(
        backend="gloo" if on_host else None, timeout=timedelta(seconds=runtime.timeout_s), group_desc="owners"
    )
    device = torch.device("cpu") if on_host else process.device.torch_device
    transport = slowed(TorchTransport(group, device), runtime.slow_link)
    return Owners(weights, strategy, transport, dtype)


def _flatten(share: dict[str, nn.Parameter], like: Tensor) -> Tensor:
    """Move weights into one flat tensor and return it."""
    flat = like.new_zeros(sum(_room(weight) for weight in share.values()))
    for weight, view in zip(share.values(), _views(share, flat), strict=True):
        weight.data = view.copy_(weight.detach())
    return flat


def _views(share: dict[str, nn.Parameter], flat: Tensor) -> list[Tensor]:
    parts = flat.split([_room(weight) for weight in share.values()]) if share else ()
    return [part[: w.numel()].view(w.shape) for part, w in zip(parts, share.values(), strict=True)]


def _room(weight: nn.Parameter) -> int:
    return -(-weight.numel() // _ALIGNED) * _ALIGNED


def _collect_in_turn(transport: Transport, flats: list[Tensor]) -> None:
    """Sum on rank 0: all of one rank, then all of the next."""
    with _threads(transport, 1):
        for source in range(1, transport.size):
            for bucket in _buckets(flats[0], "gradient"):
                if transport.rank == source:
                    transport.send(bucket, 0)
                elif transport.rank == 0:
                    arrived = transport.scratch(bucket, bucket.numel())
                    transport.recv(arrived, source)
                    bucket.add_(arrived)


def _collect_at_once(transport: Transport, flats: list[Tensor]) -> None:
    """Sum on rank 0 in the order of ranks, receiving from all ranks at the same time."""
    others = range(1, transport.size)
    with _threads(transport, physical_cores()):
        for bucket in _buckets(flats[0], "gradient"):
            if transport.rank:
                transport.send(bucket, 0)
                continue
            scratch = transport.scratch(bucket, len(others) * bucket.numel()).view(
                len(others), bucket.numel()
            )
            handles = [transport.irecv(part, rank) for part, rank in zip(scratch, others, strict=True)]
            for part, handle in zip(scratch, handles, strict=True):
                handle.wait()
                bucket.add_(part)


def _collect_by_tree(transport: Transport, flats: list[Tensor]) -> None:
    for bucket in _buckets(flats[0], "gradient"):
        reduce(transport, bucket, 0)


def _collect_by_ring(transport: Transport, flats: list[Tensor]) -> None:
    label("gradients to their owners")
    reduce_scatter(transport, flats[transport.rank], flats)


def _spread_in_turn(transport: Transport, flats: list[Tensor]) -> None:
    for to in range(1, transport.size):
        for bucket in _buckets(flats[0], "weight"):
            if transport.rank == 0:
                transport.send(bucket, to)
            elif transport.rank == to:
                transport.recv(bucket, 0)


def _spread_at_once(transport: Transport, flats: list[Tensor]) -> None:
    buckets = list(_buckets(flats[0], "weight"))
    if transport.rank:
        handles = [transport.irecv(bucket, 0) for bucket in buckets]
    else:
        handles = [transport.isend(bucket, to) for bucket in buckets for to in range(1, transport.size)]
    for handle in handles:
        handle.wait()


def _spread_by_tree(transport: Transport, flats: list[Tensor]) -> None:
    for bucket in _buckets(flats[0], "weight"):
        broadcast(transport, bucket, 0)


def _spread_by_ring(transport: Transport, flats: list[Tensor]) -> None:
    label("weights from their owners")
    all_gather(transport, flats, flats[transport.rank])


def _buckets(flat: Tensor, what: str) -> Iterator[Tensor]:
    for number, bucket in enumerate(flat.split(BUCKET_BYTES // flat.element_size())):
        label(f"{what} bucket {number}")
        yield bucket


@contextlib.contextmanager
def _threads(transport: Transport, count: int) -> Iterator[None]:
    """Set the number of threads with which rank 0 sums."""
    if transport.rank:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Way:
    """How gradients are sent to the owners, and weights from them."""

    collect: Transfer
    spread: Transfer
    on_host: bool = False
    shared: bool = False  # else rank 0 owns all


_WAYS = {
    "central_serial": _Way(_collect_in_turn, _spread_in_turn, on_host=True),
    "central_parallel": _Way(_collect_at_once, _spread_at_once, on_host=True),
    "device_sharded": _Way(_collect_by_ring, _spread_by_ring, shared=True),
    "tree_update": _Way(_collect_by_tree, _spread_by_tree),
}
