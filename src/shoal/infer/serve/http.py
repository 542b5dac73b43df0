"""What any HTTP client may do to the server: limits on size and time, who may ask at all."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.infer.serve.api import failure

_OPEN = ("/", "/health")  # paths that need no token
_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_READ_BYTES = 64 << 20  # of a request that is too large: one that is cut off may not see its answer


class Guard:
    """Lets requests through to an application that are whole, small, in time, and by who may ask.

    Without a token a browser's page from elsewhere must not reach the server under a name of its own, so that
    only the names of this machine, and the `host` that the server listens on, are answered.
    """

    def __init__(self, app: ASGIApp, host: str, token: str, body_bytes: int, body_s: float) -> None:
        self._app, self._token = app, token.encode()
        self._names = {name.encode() for name in (*_LOCAL, f"[{host}]" if ":" in host else host)}
        self._body_bytes, self._body_s = body_bytes, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, num_bytes, refusal = b"", 0, self._refusal(scope)
        try:
            async with asyncio.timeout(self._body_s):
                more = refusal is None
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    part = message.get("body", b"")
                    num_bytes += len(part)
                    more = message.get("more_body", False) and num_bytes <= _READ_BYTES
                    if num_bytes > self._body_bytes:
                        body, refusal = b"", (413, f"a request has at most {self._body_bytes} bytes")
                    else:
                        body += part
        except TimeoutError:
            refusal = 408, f"the request did not arrive within {self._body_s:g} s"
        if refusal is not None:
            await _answer(send, *refusal)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = dict(scope["headers"])
        if self._token:
            given = headers.get(b"authorization", b"")
            if scope["path"] not in _OPEN and not hmac.compare_digest(given, b"Bearer " + self._token):
                return 401, "this server asks for its token: Authorization: Bearer TOKEN"
        elif re.sub(rb":\d+$", b"", headers.get(b"host", b"")) not in self._names:
            names = b", ".join(sorted(self._names)).decode()
            return 421, f"this server has the names {names} only"
        return None


async def _answer(send: Send, status: int, sentence: str) -> None:
    body = json.dumps(failure(sentence)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class TimedProtocol(H11Protocol):
    """HTTP connections that end when a request does not come, or its answer is not read.

    uvicorn itself waits forever for the first request of a connection, and for a client to read.
    """

    def __init__(self, *args: Any, request_s: float, stall_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._request_s, self._stall_s = request_s, stall_s
        self._timer: asyncio.TimerHandle | None = None  # to a request's header
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # or pause_writing tells of large answers only
        self._timer = self.loop.call_later(self._request_s, self._give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._request_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self.transport.is_closing() or self.conn.our_state is not h11.IDLE:
            return
        self._refuse(408, f"no whole request came within {self._request_s:g} s")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP request that the server understands")

    def _refuse(self, status: int, sentence: str) -> None:
        body = json.dumps(failure(sentence)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
