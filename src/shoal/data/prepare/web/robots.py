"""robots.txt of each origin (RFC 9309), asked once and kept for a while."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from shoal.data.prepare.stages.documents import require

AGENT = "shoal"  # the name that rules are for
MAX_BYTES = 512 << 10  # what is longer is read up to here; RFC 9309 asks for at least 500 KiB
_TIMEOUT_S = 15.0
_KEPT_S, _FAILED_S = 86_400.0, 300.0  # how long rules, and a failure to read them, are kept
_KEPT = 4096  # origins
_OF_THE_HOST = ("malformed", "private address", "name not found", "no connection", "TLS failure")
UNREACHABLE = "robots.txt unreachable"


class Refused(Exception):
    """A URL that is not fetched, or gave no page: `reason` in a few words, `detail` for this case."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class Robots:
    """Rules by origin. `get` fetches a robots.txt: (status, bytes), or Refused."""

    def __init__(
        self,
        get: Callable[[str], Awaitable[tuple[int, bytes]]],
        slow_down: Callable[[str, float], None],
        max_delay: float,
    ) -> None:
        self._get, self._slow_down, self._max_delay = get, slow_down, max_delay
        self._parse = require("protego").Protego.parse
        self._known: OrderedDict[str, tuple[float, asyncio.Task[Any]]] = OrderedDict()

    async def check(self, url: Any) -> None:
        """Raise Refused where the rules of a yarl.URL's origin forbid it, or cannot be had."""
        origin, now = str(url.origin()), asyncio.get_running_loop().time()
        began, task = self._known.get(origin, (0.0, None))
        if task is None or (task.done() and now - began > (_FAILED_S if task.exception() else _KEPT_S)):
            task = asyncio.create_task(self._load(origin))
            self._known[origin] = (now, task)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        rules = await asyncio.shield(task)  # others wait for it, too
        if rules is None:
            return
        self._slow_down(url.raw_host, min(rules.crawl_delay(AGENT) or 0.0, self._max_delay))
        if not rules.can_fetch(str(url), AGENT):
            raise Refused("disallowed by robots.txt")

    async def _load(self, origin: str) -> Any:
        """Return the rules of an origin, None where it has none."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, body = await self._get(f"{origin}/robots.txt")
        except TimeoutError:
            raise Refused(UNREACHABLE, f"no answer in {_TIMEOUT_S:g} s") from None
        except Refused as refused:
            if refused.reason in _OF_THE_HOST:
                raise
            if "redirect" in refused.reason:  # RFC 9309, 2.3.1.2: as if it were not there
                return None
            raise Refused(UNREACHABLE, refused.reason) from None
        if status == 429 or status >= 500:
            raise Refused(UNREACHABLE, f"HTTP {status}")
        if status != 200:
            return None
        return self._parse(body.decode("utf-8", "replace"))

    async def close(self) -> None:
        """End what is still being asked."""
        tasks = [task for _, task in self._known.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
