"""One URL over HTTP: robots.txt, redirects, retries, limits. Every outcome has a reason."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import functools
import hashlib
import itertools
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.data.prepare.stages.documents import StageSettings, require
from shoal.data.prepare.web.address import (
    ForbiddenAddressError,
    Lookup,
    PublicResolver,
    is_address,
    is_public,
)
from shoal.data.prepare.web.hosts import Hosts
from shoal.data.prepare.web.robots import MAX_BYTES, Refused, Robots

_REDIRECTS = (301, 302, 303, 307, 308)
_CONNECT_S = 15.0
_PASSING = ("no connection", "bad response")  # tried again; so are HTTP 429 and 5xx
_MAX_ROBOTS_REDIRECTS = 5  # RFC 9309, section 2.3.1.2
_LOOKED_AT = 1024  # bytes of a page in which a zero byte tells that it is no text
_WIDE = (b"\xff\xfe", b"\xfe\xff")  # UTF-16 and UTF-32


class Fetch(StageSettings):
    """How pages are fetched."""

    name: ClassVar[str] = "fetch"
    concurrency: PositiveInt = 32
    """URLs in work at once."""
    per_host: PositiveInt = 2
    """Requests to one host at once."""
    delay: NonNegativeFloat = 1.0
    """Seconds between the starts of two requests to one host. A longer Crawl-delay of its robots.txt counts
    instead, up to max_wait."""
    deadline: PositiveFloat = 60.0
    """Seconds for one URL in all, with robots.txt, waiting, redirects and retries."""
    retries: NonNegativeInt = 2
    """How often a request is tried again after a broken connection or the statuses 429 and 5xx."""
    backoff: NonNegativeFloat = 1.0
    """Seconds before the first retry; doubled for each further one. A longer Retry-After counts instead."""
    max_wait: NonNegativeFloat = 30.0
    """Longest wait before a retry, in seconds. If a server asks for more, the URL is given up."""
    max_bytes: PositiveInt = 8 << 20
    """Largest page in bytes, decompressed."""
    max_redirects: NonNegativeInt = 5
    """Most redirects of one URL."""
    content_types: tuple[str, ...] = ("text/html", "application/xhtml+xml", "text/plain")
    """Content types that are kept."""
    contact: str = Field(default="", pattern=r"^[\x21-\x7e]*$", max_length=200)
    """URL or e-mail address in the user agent, where operators of sites can reach you."""
    robots: bool = True
    """Obey robots.txt. Switch it off for your own sites only."""
    allow_private: bool = False
    """Connect to private, loopback, link-local and reserved addresses, too."""

    @property
    def user_agent(self) -> str:
        """Return what is sent to servers."""
        return f"shoal/{version('shoal')}" + (f" (+{self.contact})" if self.contact else "")


@dataclass(frozen=True)
class Answer:
    """A response whose body was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-1 of the body, as WARC files give it."""
        return labelled(hashlib.sha1(self.body).digest())


def labelled(sha1: bytes) -> str:
    """Write a SHA-1 digest as WARC files do: labelled, in base 32."""
    return f"sha1:{base64.b32encode(sha1).decode()}"


@dataclass
class Visit:
    """What became of a URL."""

    url: str
    final_url: str = ""
    status: int = 0
    reason: str = "ok"
    detail: str = ""
    seconds: float = 0.0
    redirects: int = 0
    attempts: int = 0
    answer: Answer | None = None  # of a page that is kept


class Client:
    """An HTTP client for many URLs, in one event loop; close it at the end."""

    def __init__(self, settings: Fetch, hosts: Hosts, threads: Executor, lookup: Lookup) -> None:
        self._aiohttp = require("aiohttp")
        self._make = require("yarl").URL
        self._settings, self._hosts = settings, hosts
        self._robots = Robots(self._get_robots, hosts.slow_down, settings.max_wait)
        connector = self._aiohttp.TCPConnector(
            resolver=PublicResolver(lookup, threads, settings.allow_private), limit=0, ttl_dns_cache=300
        )
        self._session = self._aiohttp.ClientSession(
            connector=connector,
            headers={
                "User-Agent": settings.user_agent,
                "Accept": ", ".join(settings.content_types),
                "Accept-Encoding": "gzip, deflate",
            },
            timeout=self._aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=self._aiohttp.DummyCookieJar(),
            trust_env=False,  # a proxy would look up names by itself
        )

    async def close(self) -> None:
        """End all connections."""
        await self._robots.close()
        await self._session.close()

    async def fetch(self, url: str) -> Visit:
        """Fetch a page. Never raises for what a server does; takes no longer than the deadline."""
        visit, began = Visit(url), time.monotonic()
        try:
            async with asyncio.timeout(self._settings.deadline):
                answer = await self._follow(visit, self._settings.max_redirects, page=True)
            if answer.status != 200:
                raise Refused(f"HTTP {answer.status}")
            if not answer.body.strip():
                raise Refused("empty page")
            if b"\0" in answer.body[:_LOOKED_AT] and not answer.body.startswith(_WIDE):
                raise Refused("binary content")
            visit.answer = answer
        except Refused as refused:
            visit.reason, visit.detail = refused.reason, refused.detail
        except TimeoutError:
            visit.reason, visit.detail = "timeout", f"more than {self._settings.deadline:g} s"
        visit.seconds = round(time.monotonic() - began, 3)
        return visit

    async def _get_robots(self, url: str) -> tuple[int, bytes]:
        answer = await self._follow(Visit(url), _MAX_ROBOTS_REDIRECTS, page=False)
        return answer.status, answer.body

    async def _follow(self, visit: Visit, max_redirects: int, *, page: bool) -> Answer:
        """Get a URL and the ones it redirects to, each with all checks."""
        at, seen = self._target(None, visit.url), set[str]()
        while True:
            visit.final_url = str(at)
            if is_address(at.raw_host) and not (self._settings.allow_private or is_public(at.raw_host)):
                raise Refused("private address", at.raw_host)
            if page and self._settings.robots:
                await self._robots.check(at)
            answer = await self._persist(at, visit, page=page)
            if answer.status not in _REDIRECTS:
                return answer
            seen.add(str(at))
            visit.redirects += 1
            at = self._target(at, answer.headers.get("Location", ""))
            if str(at) in seen:
                raise Refused("redirect loop", str(at))
            if visit.redirects > max_redirects:
                raise Refused("too many redirects", f"more than {max_redirects}")

    def _target(self, at: Any, location: str) -> Any:
        """Return the URL to get: the one given, or where a redirect from `at` leads."""
        try:
            target = self._make(location)
            target = target if at is None else at.join(target).with_fragment(None)
            bad = not location or target.scheme not in ("http", "https") or not target.raw_host
            if bad or target.raw_user is not None or target.raw_password is not None:
                raise ValueError(location)
        except ValueError:
            raise Refused("malformed" if at is None else "bad redirect", location[:200]) from None
        return target

    def host_of(self, url: str) -> str:
        """Return the host that a URL waits for; "" where it has none."""
        try:
            return self._make(url).raw_host or ""
        except ValueError:
            return ""

    async def _persist(self, at: Any, visit: Visit, *, page: bool) -> Answer:
        """Request a URL, again where the failure may pass."""
        for attempt in itertools.count():
            visit.attempts += 1
            answer, failure, wait = None, None, 0.0
            try:
                answer = await self._request(at, visit, page=page)
                if answer.status != 429 and answer.status < 500:
                    return answer
                wait = _retry_after(answer.headers.get("Retry-After", ""))
            except (self._aiohttp.ClientError, OSError, ValueError) as error:
                failure = self._refusal(error)
            wait = max(wait, self._settings.backoff * 2**attempt)
            passing = failure is None or failure.reason in _PASSING
            if not passing or attempt >= self._settings.retries or wait > self._settings.max_wait:
                if answer is None:
                    assert failure is not None
                    raise failure
                return answer
            await asyncio.sleep(wait)
        raise AssertionError("an endless loop ended")

    async def _request(self, at: Any, visit: Visit, *, page: bool) -> Answer:
        """Send one request when its host allows one, and read the body of a status 200."""
        async with (
            self._hosts.turn(at.raw_host),
            self._session.get(at, allow_redirects=False) as response,
        ):
            visit.status, body = response.status, b""
            if response.status == 200 and page:
                body = await self._read_page(response)
            elif response.status == 200:
                body = (await _read(response, MAX_BYTES))[:MAX_BYTES]
            return Answer(response.status, response.headers, body)

    async def _read_page(self, response: Any) -> bytes:
        """Read a body of an allowed type and size."""
        given = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if given not in self._settings.content_types:
            raise Refused("content type", given[:100] or "none")
        limit = self._settings.max_bytes
        if (response.content_length or 0) > limit:
            raise Refused("too large", f"{response.content_length:,} bytes")
        body = await _read(response, limit)
        if len(body) > limit:
            raise Refused("too large", f"more than {limit:,} bytes")
        return body

    def _refusal(self, error: Exception) -> Refused:
        """Turn an error of the library into a reason."""
        http, cause = self._aiohttp, getattr(error, "os_error", None)
        detail = " ".join(str(error).split())[:200]
        if isinstance(cause, ForbiddenAddressError):
            return Refused("private address", str(cause)[:200])
        if isinstance(error, http.ClientConnectorDNSError):
            again = getattr(cause, "errno", None) == socket.EAI_AGAIN
            return Refused("no connection" if again else "name not found", detail)
        if isinstance(error, http.ClientSSLError | http.ClientConnectorCertificateError):
            return Refused("TLS failure", detail)
        if isinstance(error, http.InvalidURL):
            return Refused("malformed", detail)
        if isinstance(error, http.ClientConnectionError | OSError):
            return Refused("no connection", detail or type(error).__name__)
        return Refused("bad response", detail or type(error).__name__)


async def _read(response: Any, limit: int) -> bytes:
    """Read a decompressed body piece by piece, up to the piece that exceeds the limit."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit:
            response.close()
            break
    return bytes(body)


def _retry_after(value: str) -> float:
    """Return the seconds of a Retry-After header (RFC 9110, section 10.2.3), 0 where there is none."""
    if value.strip().isdecimal():
        return float(value) if len(value) < 10 else float("inf")
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
