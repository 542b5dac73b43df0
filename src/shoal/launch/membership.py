"""Heartbeats of several hosts or replicas in a store: a thread writes its own status and reads all others.

A member whose status no longer changes is lost. Callers read copies only, so a dead link cannot hold them up.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

_STILL_BEATS = 10  # nothing read for as long: the silence of the others is counted anew


class Membership:
    """The last status of each member, by its number, and when it came."""

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        keys: Sequence[str],
        own: int | None,
        status: dict[str, Any],
        beat_s: float,
    ) -> None:
        """Prepare to write `status`, as it is then, under the key number `own`; None only reads.

        `connect` gives a connection that nobody else uses.
        """
        self.told: dict[int, dict[str, Any]] = {}
        self.status = status
        self.reached = time.monotonic()  # when the store was last heard
        self._connect, self._keys, self._own, self._beat_s = connect, list(keys), own, beat_s
        self._changed_at: dict[int, float] = {}
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Say whether the thread runs: it ends when the store is gone."""
        return self._thread.is_alive()

    def silent_s(self, number: int) -> float:
        """Return for how long a status has not changed; one that was never there, forever."""
        return time.monotonic() - self._changed_at.get(number, float("-inf"))

    def leave(self, wait_s: float) -> None:
        """Write the status a last time and end the thread."""
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        texts: dict[int, bytes] = {}
        with contextlib.suppress(RuntimeError):  # the store is gone, and its host with it
            store = self._connect()
            for beat in itertools.count():
                leaving = self._leaving.is_set()
                if self._own is not None:
                    store.set(self._keys[self._own], json.dumps({**self.status, "beat": beat}))
                numbered = list(enumerate(self._keys))
                present = [n for n, key in numbered if n in self.told or store.check([key])]
                found = zip(present, store.multi_get([self._keys[n] for n in present]), strict=True)
                news = {n: text for n, text in found if text != texts.get(n)}
                texts |= news
                now = time.monotonic()
                stood_still = now - self.reached > _STILL_BEATS * self._beat_s  # as the others may have
                self._changed_at |= dict.fromkeys(present if stood_still else news, now)
                self.told.update({n: json.loads(text) for n, text in news.items()})  # all at once
                self.reached = now
                if leaving:
                    return
                self._leaving.wait(self._beat_s)
