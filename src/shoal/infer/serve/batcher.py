"""Requests that come at any time, computed together: one thread has the model, another hands it rows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.errors import ShoalError
from shoal.infer.generate import DecodingBatch, Engine, GeneratedRow
from shoal.infer.sampling import Sampling

_READ_BESIDE = 512  # tokens of new prompts that are read between two tokens of the live rows


class BusyError(ShoalError):
    """As many rows wait as may."""


class GoneError(ShoalError):
    """The thread that computes has ended."""


@dataclass(eq=False)  # each is itself only
class Ticket:
    """A row to be continued. `deliver` is called on the batcher's thread: each token, then once None.

    An exception in place of them says why the row ends early.
    """

    row: GeneratedRow
    sampling: Sampling
    deliver: Callable[[int | Exception | None], None]
    cancelled: bool = False


class Batcher:
    """Continues rows of at most `engine.capacity` tokens, as many at a time as the engine has room for.

    What a row draws does not depend on what is computed beside it.
    """

    def __init__(
        self, engine: Engine, stop_id: int | None, max_waiting: int, on_failure: Callable[[], None]
    ) -> None:
        """Let at most `max_waiting` rows wait; `on_failure` is called when the model fails."""
        self._engine = engine
        self._batch: DecodingBatch[Ticket] = DecodingBatch(engine, stop_id)
        self._max_waiting = max_waiting
        self._waiting: deque[Ticket] = deque()
        self._live: set[Ticket] = set()
        self._reading: tuple[Ticket, Iterator[int]] | None = None
        self._change = threading.Condition()
        self._closed: Exception | None = None
        self.failure: Exception | None = None
        self._on_failure = on_failure

    @property
    def capacity(self) -> int:
        """Return how many tokens a row may have, its prompt included."""
        return self._engine.capacity

    def close(self) -> None:
        """Let `run` end; what is under way ends with a GoneError."""
        self._close(GoneError("the server is stopping"))

    def run(self) -> None:
        """Compute what is submitted until `close`, or until the model fails.

        On the main thread: OpenMP waits in a slower way where two threads of a process have had work for it.
        """
        try:
            while self._wait():
                self._read()
                if self._live:
                    self._step()
        except Exception as error:
            self.failure = GoneError(f"the model failed: {error}")
            self._close(self.failure)
            self._on_failure()
        with self._change:
            rest = self._all()
            assert self._closed is not None
        for ticket in rest:
            ticket.deliver(self._closed)

    def submit(self, tickets: list[Ticket]) -> None:
        """Hand over rows; a BusyError takes none of them."""
        with self._change:
            if self._closed is not None:
                raise self._closed
            ahead = sum(not ticket.cancelled for ticket in self._all())
            if ahead + len(tickets) > self._engine.rows + self._max_waiting:
                raise BusyError(
                    f"{ahead} requests are queued; the limit is {self._engine.rows + self._max_waiting}",
                    hint="try again in a while",
                )
            self._waiting.extend(tickets)
            self._change.notify()

    def cancel(self, tickets: list[Ticket]) -> None:
        """Give rows up: nothing more is computed for them after the token that is under way."""
        with self._change:
            for ticket in tickets:
                ticket.cancelled = True
            self._change.notify()

    def _all(self) -> list[Ticket]:
        return [*self._live, *([self._reading[0]] if self._reading else []), *self._waiting]

    def _close(self, reason: Exception) -> None:
        with self._change:
            self._closed = self._closed or reason
            self._change.notify()

    def _wait(self) -> bool:
        """Wait for something to do, and let go of what was given up; False once closed."""
        with self._change:
            while not (self._closed or self._waiting or self._live or self._reading):
                self._change.wait()
            self._waiting = deque(ticket for ticket in self._waiting if not ticket.cancelled)
            if self._reading and self._reading[0].cancelled:
                self._reading = None
            dropped = [ticket for ticket in self._live if ticket.cancelled]
            self._live.difference_update(dropped)
            goes_on = self._closed is None
        for ticket in dropped:
            self._batch.drop(ticket)
        return goes_on

    def _read(self) -> None:
        """Read of the waiting prompts as much as the live rows can wait for; take in those that are read."""
        budget = _READ_BESIDE
        while budget > 0:
            with self._change:
                if self._reading is None and self._waiting and len(self._live) < self._engine.rows:
                    ticket = self._waiting.popleft()
                    self._reading = (ticket, self._batch.add(ticket, ticket.row, ticket.sampling))
                if self._reading is None:
                    return
                ticket, parts = self._reading
            num_read = next(parts, None)
            if num_read is None:
                with self._change:
                    self._reading = None
                    self._live.add(ticket)
            else:
                budget -= num_read

    def _step(self) -> None:
        for ticket, token in self._batch.advance():
            if token is None:
                with self._change:
                    self._live.remove(ticket)
            ticket.deliver(token)
