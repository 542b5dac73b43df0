"""Transport between threads of one process, each acting as a rank: for tests in milliseconds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.comm.transport import Transport
from shoal.gradsync.exchange import Handle

Result = TypeVar("Result")


class ThreadTransport(Transport):
    """Transport of one rank; there is a wire for each pair of ranks and direction."""

    def __init__(self, wires: dict[tuple[int, int], _Wire], rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._wires = wires

    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        arriving = [self._wires[source, self.rank].take_into(tensor) for tensor, source in receives]
        return [*arriving, *(self._wires[self.rank, to].put(tensor) for tensor, to in sends)]


def run_ranks(size: int, work: Callable[[Transport], Result], timeout_s: float = 20.0) -> list[Result]:
    """Run `work` on `size` ranks, each a thread; return the results. Raises the first exception of a rank.

    A rank that waits `timeout_s` for another gets a TimeoutError, which is raised only if there is no other
    exception.
    """
    wires = {(source, to): _Wire(timeout_s) for source in range(size) for to in range(size)}
    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(work, ThreadTransport(wires, rank, size)) for rank in range(size)]
    errors = [error for rank in ranks if (error := rank.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, TimeoutError)):
        raise error
    return [rank.result() for rank in ranks]


class _Wire:
    """Tensors in flight. The nth tensor received is the nth one sent, whatever the order of waits.

    A tensor is copied when the receiver waits, not before, so that tests find tensors that are written or
    read too early. On a GPU each rank has a stream of its own. The copy runs after the sender's work so far,
    and the sender's work after its wait runs after the copy.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sent: dict[int, tuple[Tensor, Any]] = {}
        self._copied: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._sends, self._receives = itertools.count(), itertools.count()

    def put(self, tensor: Tensor) -> _Transfer:
        with self._changed:
            number = next(self._sends)
            self._sent[number] = tensor, _moment(tensor)
            self._changed.notify_all()
        return _Transfer(lambda: self._wait_until_taken(number, tensor))

    def take_into(self, tensor: Tensor) -> _Transfer:
        number = next(self._receives)
        return _Transfer(lambda: self._take(number, tensor))

    def _take(self, number: int, into: Tensor) -> None:
        self._wait_for(lambda: number in self._sent)
        with self._changed:
            tensor, written = self._sent[number]
            assert tensor.shape == into.shape, (tensor.shape, into.shape)
            _follow(written, into)
            into.copy_(tensor)
            self._copied[number] = _moment(into)
            del self._sent[number]
            self._changed.notify_all()

    def _wait_until_taken(self, number: int, tensor: Tensor) -> None:
        self._wait_for(lambda: number not in self._sent)
        _follow(self._copied.pop(number, None), tensor)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, self._timeout_s):
                raise TimeoutError(f"no matching operation within {self._timeout_s:g} s")


def _moment(tensor: Tensor) -> torch.cuda.Event | None:
    """Record an event on this thread's stream; None on a CPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _follow(moment: torch.cuda.Event | None, tensor: Tensor) -> None:
    """Make this thread's stream wait for an event of another stream."""
    if moment is not None:
        torch.cuda.current_stream(tensor.device).wait_event(moment)


class _Transfer:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
