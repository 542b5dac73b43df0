"""Which URL is next, so that no host gets more requests at once, or sooner, than is polite."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_KEPT = 10_000  # hosts whose state is kept though nothing is in work there


@dataclass
class _Host:
    slots: asyncio.Semaphore
    delay: float
    next_at: float = 0.0  # the loop's time from which on the next request may start
    waiting: deque[Any] = field(default_factory=deque)
    active: int = 0  # items taken and not done
    requests: int = 0  # inside `turn`
    queued: bool = False


class Hosts:
    """Items that wait for their hosts. Made and used in one event loop; one task calls `get`."""

    def __init__(self, per_host: int, delay: float) -> None:
        self._per_host, self._delay = per_host, delay
        self._states: dict[str, _Host] = {}
        self._most = _KEPT
        self._due: list[tuple[float, int, _Host]] = []
        self._order, self._wake, self._stopped = itertools.count(), asyncio.Event(), False

    def put(self, host: str, item: Any) -> None:
        """Add an item of a host."""
        state = self._state(host)
        state.waiting.append(item)
        self._offer(state)

    async def get(self) -> Any:
        """Wait until a host is due and has a free place; return its next item, None after `stop`."""
        time = asyncio.get_running_loop().time
        while not self._stopped:
            if self._due and self._due[0][0] <= time():
                state = heapq.heappop(self._due)[2]
                state.queued = False
                if state.next_at <= time():
                    state.active += 1
                    item = state.waiting.popleft()
                    self._offer(state)
                    return item
                self._offer(state)
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._due[0][0] if self._due else None):
                    await self._wake.wait()
        return None

    def done(self, host: str) -> None:
        """Free the place that an item took."""
        state = self._states[host]
        state.active -= 1
        self._offer(state)
        if len(self._states) > self._most:
            now = asyncio.get_running_loop().time()
            self._states = {h: s for h, s in self._states.items() if _in_use(s, now)}
            self._most = max(_KEPT, 2 * len(self._states))

    def slow_down(self, host: str, delay: float) -> None:
        """Wait at least so many seconds between requests to this host."""
        state = self._state(host)
        state.delay = max(state.delay, delay)

    def stop(self) -> None:
        """Let `get` return None."""
        self._stopped = True
        self._wake.set()

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """Wait until one more request may go to the host, and hold its place during the block."""
        state, time = self._state(host), asyncio.get_running_loop().time
        state.requests += 1
        try:
            async with state.slots:
                start = max(time(), state.next_at)
                state.next_at = start + state.delay
                await asyncio.sleep(start - time())
                yield
        finally:
            state.requests -= 1

    def _state(self, host: str) -> _Host:
        if host not in self._states:
            self._states[host] = _Host(asyncio.Semaphore(self._per_host), self._delay)
        return self._states[host]

    def _offer(self, state: _Host) -> None:
        if state.waiting and not state.queued and state.active < self._per_host:
            state.queued = True
            heapq.heappush(self._due, (state.next_at, next(self._order), state))
            self._wake.set()


def _in_use(state: _Host, now: float) -> bool:
    return bool(state.waiting or state.active or state.requests or state.next_at > now)
