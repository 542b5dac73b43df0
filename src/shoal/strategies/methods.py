"""Methods to sum a bucket over replicas with point-to-point messages, most of them lossy."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor

from shoal.comm.all_reduce import all_reduce
from shoal.comm.collectives import all_gather, all_to_all
from shoal.comm.transport import Transport
from shoal.gradsync.exchange import Bucket
from shoal.strategies.codecs import Codec
from shoal.strategies.step_state import StepState


class Method(ABC):
    """Summation method; `feedback` is the share of the error feedback that is added to the next gradient."""

    feedback = 1.0

    def __init__(self) -> None:
        self.memory = StepState({})  # the same on all ranks

    @abstractmethod
    def add_up(self, transport: Transport, bucket: Bucket) -> Tensor | None:
        """Replace a bucket by its sum over all ranks, bit for bit the same on each. Collective.

        Returns this rank's error, a flat tensor as long as the bucket, or None without error feedback. The
        errors of all ranks and the new content add up to the sum of the buckets.
        """


class Exact(Method):
    """An exact all-reduce by one of Shoal's algorithms."""

    feedback = 0.0

    def __init__(self, algorithm: str = "chunked_ring", dtype: torch.dtype | None = None) -> None:
        """Send gradients as `dtype`, by default their own."""
        super().__init__()
        self._algorithm = algorithm
        self._dtype = dtype

    def add_up(self, transport: Transport, bucket: Bucket) -> None:
        sent = bucket.flat.to(self._dtype or bucket.flat.dtype)
        all_reduce(transport, sent, "sum", self._algorithm)
        if sent is not bucket.flat:
            bucket.flat.copy_(sent)


class TwoPhase(Method):
    """A reduce-scatter and an all-gather of encoded shares; each rank sums its share in the bucket's format.

    A rank's own part of its share is not encoded. The error of encoding a sum is kept by the rank that
    computed the sum. A rank sends 2 (n - 1)/n of the encoded bucket; for bf16 these are as many bytes as in a
    ring, which would round at each hop. Two ranks swap their encoded buckets: the same bytes, and values are
    encoded once.

    Source: Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence
    speed" (2021), section 5. The second error feedback there is not needed to keep the sum.
    """

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self._codec = codec
        self.feedback = codec.feedback

    def add_up(self, transport: Transport, bucket: Bucket) -> Tensor | None:
        rank, size, codec = transport.rank, transport.size, self._codec
        if size == 2:
            return self._swap(transport, bucket.flat)
        shares = shares_of(bucket.flat, size, codec.block)
        lost = torch.empty_like(bucket.flat)
        lost_shares = shares_of(lost, size, codec.block)
        nothing = bucket.flat.new_empty(0, dtype=torch.uint8)
        coded = [nothing if at == rank else codec.encode(share) for at, share in enumerate(shares)]
        own = shares[rank]
        arrived = [nothing.new_empty(0 if at == rank else codec.num_bytes(len(own))) for at in range(size)]
        all_to_all(transport, arrived, coded)
        for code in arrived:
            if code.numel():
                codec.decode(code, lost_shares[rank])
                own.add_(lost_shares[rank])
        coded[rank] = codec.encode(own)
        if self.feedback:
            for code, share, part in zip(coded, shares, lost_shares, strict=True):
                codec.decode(code, part)
                torch.sub(share, part, out=part)
        totals = [nothing.new_empty(codec.num_bytes(len(share))) for share in shares]
        all_gather(transport, totals, coded[rank])
        for code, share in zip(totals, shares, strict=True):
            codec.decode(code, share)
        return lost if self.feedback else None

    def _swap(self, transport: Transport, flat: Tensor) -> Tensor | None:
        own, codec = self._codec.encode(flat), self._codec
        codes = [torch.empty_like(own) for _ in range(2)]
        all_gather(transport, codes, own)
        decoded = [torch.empty_like(flat) for _ in codes]
        for code, values in zip(codes, decoded, strict=True):
            codec.decode(code, values)
        lost = flat - decoded[transport.rank] if self.feedback else None
        torch.add(*decoded, out=flat)
        return lost


def shares_of(flat: Tensor, size: int, block: int) -> list[Tensor]:
    """Cut a flat tensor into `size` shares of whole blocks; the last share may end with a shorter block."""
    blocks = -(-flat.numel() // block)
    bounds = [min(flat.numel(), block * (blocks * place // size)) for place in range(size + 1)]
    return [flat[start:end] for start, end in pairwise(bounds)]


class TopK(Method):
    """The values of largest magnitude and their indices, gathered from all ranks: 8 bytes a value.

    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory" (2018); Lin et al., "Deep gradient
    compression" (2018), without its momentum correction, which is for SGD and not for Adam.
    """

    def __init__(self, density: float, feedback: float = 1.0) -> None:
        """Send `density` of the values, at least one a bucket."""
        super().__init__()
        self._density, self.feedback = density, feedback

    def add_up(self, transport: Transport, bucket: Bucket) -> Tensor:
        flat = bucket.flat
        count = max(1, round(self._density * flat.numel()))
        places = flat.abs().topk(count, sorted=False).indices
        values = flat[places]
        everyone = [values.new_empty(count) for _ in range(transport.size)]
        all_gather(transport, everyone, values)
        whose = [places.new_empty(count, dtype=torch.int32) for _ in range(transport.size)]
        all_gather(transport, whose, places.int())
        lost = flat.clone()
        lost[places] = 0
        flat.zero_()
        for theirs, at in zip(everyone, whose, strict=True):
            flat[at.long()] += theirs  # no index occurs twice
        return lost


class PowerSGD(Method):
    """Low-rank factors P Q' instead of matrices; small matrices and all other tensors are summed whole.

    Each step is one step of subspace iteration from the Q of the step before. A rank's error is the part of
    its matrix that is orthogonal to P. Each rank orthogonalises P itself, so ranks with other
    hardware, or another number of threads, may get other bits.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
    optimization" (2019), algorithm 1 with a warm start.
    """

    def __init__(self, rank: int, parameters: dict[str, Tensor]) -> None:
        """Draw the first Q of each matrix by its name. Dims after the first are flattened to columns."""
        super().__init__()
        tall = {name: tensor.flatten(1) for name, tensor in parameters.items() if tensor.ndim > 1}
        first = {
            f"q.{name}": _draw(name, matrix, rank)
            for name, matrix in tall.items()
            if rank * sum(matrix.shape) < matrix.numel()
        }
        self.memory = StepState(first)

    def add_up(self, transport: Transport, bucket: Bucket) -> Tensor:
        lost = bucket.flat.clone()
        lost_parts = lost.split([view.numel() for view in bucket.views.values()])
        thin, plain = [], []  # (name of Q, matrix, its error); tensors that are sent whole
        for (name, view), part in zip(bucket.views.items(), lost_parts, strict=True):
            if f"q.{name}" in self.memory.tensors:
                thin.append((f"q.{name}", view.flatten(1), part.view_as(view).flatten(1)))
            else:
                part.zero_()
                plain.append(view)
        ps = [matrix @ self.memory.tensors[q] for q, matrix, _ in thin]
        _all_reduce_together(transport, [*ps, *plain])
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = [matrix.T @ p for (_, matrix, _), p in zip(thin, ps, strict=True)]
        for (_, matrix, lost_matrix), p, q in zip(thin, ps, qs, strict=True):
            torch.sub(matrix, p @ q.T, out=lost_matrix)
        _all_reduce_together(transport, qs)
        for (name, matrix, _), p, q in zip(thin, ps, qs, strict=True):
            torch.mm(p, q.T, out=matrix)
            self.memory.write(name, q)
        return lost


def _draw(name: str, matrix: Tensor, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(matrix.shape[1], rank, generator=generator).to(matrix.device, matrix.dtype)


def _all_reduce_together(transport: Transport, tensors: list[Tensor]) -> None:
    """Sum several tensors in one all-reduce. Collective over the transport."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    all_reduce(transport, flat)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
