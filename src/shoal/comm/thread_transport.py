"""Tensors between threads of one process, each of which plays a rank: for tests in milliseconds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from shoal.comm.transport import Handle, Transport

Result = TypeVar("Result")


class ThreadTransport(Transport):
    """One rank's end of the wires, of which there is one for each pair and direction."""

    def __init__(self, wires: dict[tuple[int, int], _Wire], rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._wires = wires

    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        for tensor, to in sends:
            self._wires[self.rank, to].put(tensor.clone())
        return [self._wires[source, self.rank].take_into(tensor) for tensor, source in receives]


def run_ranks(size: int, work: Callable[[Transport], Result], timeout_s: float = 20.0) -> list[Result]:
    """Return what `work` returned on each of `size` ranks, each a thread. Raises what a rank raised.

    A rank that waits `timeout_s` for a tensor gets a TimeoutError.
    """
    wires = {(source, to): _Wire(timeout_s) for source in range(size) for to in range(size)}
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, [ThreadTransport(wires, rank, size) for rank in range(size)]))


class _Wire:
    """Tensors on their way; the nth one received is the nth one sent, in whatever order one waits."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sent: dict[int, Tensor] = {}
        self._arrived = threading.Condition()
        self._sends, self._receives = itertools.count(), itertools.count()

    def put(self, tensor: Tensor) -> None:
        with self._arrived:
            self._sent[next(self._sends)] = tensor
            self._arrived.notify_all()

    def take_into(self, tensor: Tensor) -> _Receiving:
        return _Receiving(self, next(self._receives), tensor)

    def take(self, number: int) -> Tensor:
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._sent, self._timeout_s):
                raise TimeoutError(f"nothing came for {self._timeout_s:g} s")
            return self._sent.pop(number)


class _Receiving:
    def __init__(self, wire: _Wire, number: int, tensor: Tensor) -> None:
        self._wire, self._number, self._tensor = wire, number, tensor

    def wait(self) -> None:
        sent = self._wire.take(self._number)
        assert (sent.shape, sent.dtype) == (self._tensor.shape, self._tensor.dtype)
        self._tensor.copy_(sent)
