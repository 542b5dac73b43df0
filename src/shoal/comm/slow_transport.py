"""Simulated slow link: sends from one half of the ranks to the other half are delayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from shoal.comm.transport import Transport
from shoal.errors import InputError
from shoal.gradsync.exchange import Handle

MBIT = 1e6 / 8  # bytes


class SlowTransport(Transport):
    """Transport that limits the bytes a second that each rank sends to the other half of the ranks.

    A tensor is sent when its last byte would have arrived. The library's own all-reduce is not delayed.
    """

    def __init__(
        self,
        whole: Transport,
        bytes_per_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if whole.device.type != "cpu":
            raise InputError(
                f"runtime.slow_link with tensors on {whole.device}: transfers between GPUs are not slowed",
                hint="use --runtime.device cpu",
            )
        super().__init__(whole.rank, whole.size, whole.device, whole.traffic)
        self.hosts = whole.hosts
        self._whole, self._bytes_per_s = whole, bytes_per_s
        self._now, self._sleep = now, sleep
        self._free = 0.0  # when everything sent before has arrived
        self._cable = ThreadPoolExecutor(1, "slow link")

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        self._whole.all_reduce(tensor, operation)

    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        far = [(tensor, to) for tensor, to in sends if self._is_far(to)]
        near = [(tensor, to) for tensor, to in sends if not self._is_far(to)]
        handles = list(self._whole._begin(near, receives))
        for tensor, to in far:
            self._free = max(self._free, self._now()) + tensor.nbytes / self._bytes_per_s
            handles.append(_Sent(self._cable.submit(self._send, tensor, to, self._free)))
        return handles

    def _is_far(self, rank: int) -> bool:
        return (2 * rank < self.size) != (2 * self.rank < self.size)

    def _send(self, tensor: Tensor, to: int, leaves: float) -> None:
        self._sleep(max(0.0, leaves - self._now()))
        for handle in self._whole._begin([(tensor, to)], []):
            handle.wait()


class _Sent:
    def __init__(self, future: Future[None]) -> None:
        self.wait = future.result


def slowed(transport: Transport, mbit: float) -> Transport:
    """Return a transport with a link of `mbit` Mbit/s between the halves; 0 returns it unchanged."""
    return SlowTransport(transport, mbit * MBIT) if mbit else transport
