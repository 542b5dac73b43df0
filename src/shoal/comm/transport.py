"""Interface between collectives and a network: point-to-point operations that count bytes and messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.gradsync.exchange import Handle, Traffic


class Transport(ABC):
    """Point-to-point operations between a rank and the others of its group.

    Between two ranks tensors arrive in the order in which they were sent. The numbers of bytes of a send and
    its receive must be equal. Tensors may have any format and must be contiguous and on `device`. Empty
    tensors are not sent.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device | None = None, traffic: Traffic | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        self.traffic = traffic or Traffic()
        self.hosts: list[list[int]] = [list(range(size))]  # the ranks of each; set from outside
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self.device)

    def isend(self, tensor: Tensor, to: int) -> Handle:
        """Start to send a tensor."""
        return self._start([(tensor, to)], [])

    def irecv(self, tensor: Tensor, source: int) -> Handle:
        """Start to receive into a tensor."""
        return self._start([], [(tensor, source)])

    def iexchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Handle:
        """Start a send and a receive at once, for ranks that all do both before any of them waits."""
        return self._start([(outgoing, to)], [(incoming, source)])

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor; return when it may be overwritten."""
        self.isend(tensor, to).wait()

    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive into a tensor; return when it has arrived."""
        self.irecv(tensor, source).wait()

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        """Send and receive; return when both are done."""
        self.iexchange(outgoing, to, incoming, source).wait()

    def scratch(self, like: Tensor, numel: int) -> Tensor:
        """Return memory for `numel` elements, which the next call returns again.

        The memory is kept, as allocating it anew would take as long as sending its contents.
        """
        num_bytes = numel * like.element_size()
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._scratch[:num_bytes].view(like.dtype)

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        """Reduce a tensor over all ranks by the library's own algorithm, whose bytes are not counted.

        An average is left as a sum. Unsupported formats raise the library's own error.

        Raises:
            InputError: The library has no all-reduce.
        """
        raise InputError(
            f"{type(self).__name__} has no all-reduce of its own", hint="choose one of shoal's algorithms"
        )

    def group(self, ranks: Sequence[int]) -> Transport:
        """Return a transport to some of the ranks, numbered in the order given, from 0.

        Making a group sends nothing. Its traffic is counted in that of this transport.
        """
        return _Group(self, ranks)

    def check(self, tensor: Tensor) -> None:
        """Raise InputError for a tensor that this transport cannot send."""
        if tensor.device.type != self.device.type or not tensor.is_contiguous():
            kind = "" if tensor.is_contiguous() else "not "
            raise InputError(
                f"a tensor on {tensor.device}, {kind}contiguous, cannot be sent over {type(self).__name__}",
                hint=f"contiguous tensors on {self.device.type} can",
            )

    def synchronise(self) -> None:
        """Wait for the device; on a GPU, `Handle.wait` only orders later work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _start(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Handle:
        outgoing = [(self._as_bytes(tensor), to) for tensor, to in sends if tensor.numel()]
        incoming = [(self._as_bytes(tensor), source) for tensor, source in receives if tensor.numel()]
        self.traffic.num_bytes += sum(tensor.nbytes for tensor, _ in outgoing)
        self.traffic.num_messages += len(outgoing)
        return Several(self._begin(outgoing, incoming))

    def _as_bytes(self, tensor: Tensor) -> Tensor:
        self.check(tensor)
        return tensor.detach().view(-1).view(torch.uint8)

    @abstractmethod
    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        """Start transfers, which must be able to run at the same time."""


class Several:
    """Handle of several transfers."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


class _Group(Transport):
    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        assert list(ranks).count(whole.rank) == 1, (whole.rank, ranks)
        super().__init__(list(ranks).index(whole.rank), len(ranks), whole.device, whole.traffic)
        self._whole = whole
        self._ranks = list(ranks)

    def scratch(self, like: Tensor, numel: int) -> Tensor:
        return self._whole.scratch(like, numel)

    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        return self._whole._begin(
            [(tensor, self._ranks[to]) for tensor, to in sends],
            [(tensor, self._ranks[source]) for tensor, source in receives],
        )
