"""Computing what a step needs while the step before it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Gives `make(step)` and has a thread make the next one. `make` is a pure function: nothing to save."""

    def __init__(self, make: Callable[[int], T], in_thread: Callable[[], None] | None = None) -> None:
        """Make in one background thread, which calls `in_thread` first."""
        self._make = make
        self._thread = ThreadPoolExecutor(1, "ahead", in_thread)
        self._next: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """Return what was made for `step`, made now if another one was expected; start on the step after it.

        An error of the making is raised here, in the step that it belongs to, with its own traceback.
        """
        expected, future = self._next or (0, None)
        if future is None or expected != step:
            future = self._thread.submit(self._make, step)
        self._next = step + 1, self._thread.submit(self._make, step + 1)
        return future.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
