"""`shoal serve`: OpenAI's completions and chats over HTTP, and a page to try a model on."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from shoal.errors import InputError, ShoalError
from shoal.infer.generate import Engine, GeneratedRow
from shoal.infer.load import TextModel, load_text_model
from shoal.infer.serve.api import (
    Answer,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    failure,
    usage,
)
from shoal.infer.serve.batcher import Batcher, BusyError, GoneError, Ticket
from shoal.infer.serve.chat import Chat
from shoal.infer.serve.http import Guard, TimedProtocol
from shoal.infer.text import Writer
from shoal.models.cache import KVCache
from shoal.runtime.device import select_device
from shoal.runtime.memory import free_memory

T = TypeVar("T")

_SHORTEST_TOKEN = 16
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True)
class Limits:
    """What one client may take of the server."""

    batch_size: int = 16  # texts computed at a time
    max_len: int = 0  # tokens of one, its prompt included; 0: as many as the model has positions
    waiting: int = 256  # texts that wait for that
    body_bytes: int = 256 << 10
    body_s: float = 10.0  # for a request to arrive whole
    request_s: float = 120.0  # for its answer
    stall_s: float = 30.0  # that a client may leave its answer unread
    grace_s: int = 5  # for what is under way once the server is to stop

    def __post_init__(self) -> None:
        at_least_1 = {
            "batch-size": self.batch_size,
            "max-waiting": self.waiting,
            "time-limit": self.request_s,
            "max-len": self.max_len or 1,
        }
        for option, value in at_least_1.items():
            if not 1 <= value < float("inf"):
                raise InputError(f"--{option} {value:g} is not allowed", hint="use 1 or more")


@dataclass(frozen=True)
class Address:
    """Where to listen; beyond this machine only with a token."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"--port {self.port} is not a port", hint="use 1 to 65535, or 0 for a free one")
        if not self.token and not _is_loopback(self.host):
            raise InputError(
                f"--host {self.host} accepts connections from other machines: a token is required",
                hint="write a long random word into a file that only you can read: --token-file FILE",
            )

    def listen(self) -> socket.socket:
        """Return a socket that listens."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=1024)
        except OSError as error:
            raise InputError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror or error}",
                hint="use another --port, or 0 for a free one",
            ) from error


def run(path: Path, address: Address, limits: Limits, device: str) -> None:
    """Load a run, a checkpoint or a Hugging Face folder and serve it until SIGINT or SIGTERM."""
    listener = address.listen()  # taken before the model is loaded: what cannot be had is told at once
    loaded = load_text_model(path, select_device(device, 0, 1).torch_device)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file
    name = path.resolve().name
    server, batcher = build_server(loaded, name, address, limits)
    web = threading.Thread(target=run_web, args=(server, batcher, listener), name="web")

    def stop(*_: object) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    host, port = listener.getsockname()[:2]
    place = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"{name}: {limits.batch_size} texts of at most {batcher.capacity} tokens at a time")
    print(f"serving at {place}/ (API: {place}/v1); Ctrl-C stops", flush=True)
    web.start()
    batcher.run()
    web.join()
    if batcher.failure is not None:
        raise ShoalError(str(batcher.failure)) from batcher.failure
    print("stopped")


def run_web(server: uvicorn.Server, batcher: Batcher, listener: socket.socket) -> None:
    """Answer until the server is to exit and what is under way is done; then let the batcher end."""
    try:
        server.run(sockets=[listener])
    finally:
        batcher.close()


class Server(uvicorn.Server):
    """Tells what is still under way, when it has had its time after a stop, that it comes to nothing."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher, grace_s: float) -> None:
        super().__init__(config)
        self._batcher, self._grace_s = batcher, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace_s, self._batcher.close)
        await super().shutdown(sockets)


def build_server(loaded: TextModel, name: str, address: Address, limits: Limits) -> tuple[Server, Batcher]:
    """Return a server and what computes for it, neither of them started; it ends when the other fails.

    An InputError says where the texts need more memory than there is.
    """

    def stop() -> None:
        server.should_exit = True

    shape = loaded.model.shape
    max_len = min(limits.max_len or shape.max_seq_len, shape.max_seq_len)
    wanted = KVCache.num_bytes(shape, limits.batch_size, max_len, loaded.model.head_parts)
    if wanted > (there := free_memory(next(loaded.model.parameters()).device)):
        raise InputError(
            f"{limits.batch_size} texts of {max_len} tokens need {wanted / 1e9:.1f} GB, and "
            f"{there / 1e9:.1f} GB are free",
            hint="use a smaller --max-len or --batch-size",
        )
    engine = Engine(loaded.model, limits.batch_size, max_len)
    batcher = Batcher(engine, loaded.eod_id, limits.waiting, stop)
    app = build_app(loaded, name, batcher, limits)
    guarded = Guard(app, address.host, address.token, limits.body_bytes, limits.body_s)
    http: Any = partial(TimedProtocol, request_s=limits.body_s, stall_s=limits.stall_s)
    config = uvicorn.Config(
        guarded,
        http=http,
        ws="none",
        log_level="error",
        timeout_graceful_shutdown=limits.grace_s + 5,  # to tell clients
        server_header=False,
    )
    server = Server(config, batcher, limits.grace_s)
    return server, batcher


def build_app(loaded: TextModel, name: str, batcher: Batcher, limits: Limits) -> FastAPI:
    """Return the application; what it refuses is a sentence in OpenAI's form."""
    app = FastAPI(title="shoal", docs_url=None, redoc_url=None, openapi_url=None)
    model = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "shoal",
        "max_model_len": batcher.capacity,
    }
    page = files("shoal.infer.serve").joinpath("page.html").read_text()
    chat = Chat(loaded.tokenizer, loaded.checkpoint)

    @app.get("/")
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{wanted:path}")
    async def model_named(wanted: str) -> dict[str, Any]:
        _check_name(wanted, name)
        return model

    @app.post("/tokenize")
    async def tokenize(wanted: TokenizeRequest) -> dict[str, Any]:
        _check_name(wanted.model, name)
        tokens = await asyncio.to_thread(loaded.tokenizer.encode, wanted.prompt) or [loaded.eod_id]
        return {"count": len(tokens), "max_model_len": batcher.capacity, "tokens": tokens}

    @app.post("/v1/completions")
    async def completions(wanted: CompletionRequest, request: Request) -> Response:
        _check_name(wanted.model, name)
        return await respond(wanted, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(wanted: ChatRequest, request: Request) -> Response:
        _check_name(wanted.model, name)
        prompt = await asyncio.to_thread(chat.tokens, [message.plain() for message in wanted.messages])
        return await respond(wanted.as_completion(prompt, chat.stops, batcher.capacity), request, chat)

    async def respond(wanted: CompletionRequest, request: Request, chat: Chat | None = None) -> Response:
        rows = await asyncio.to_thread(wanted.rows, loaded, batcher.capacity)
        writers = [Writer(loaded.tokenizer, row.tokens, wanted.stops) for row in rows]
        answer = Answer(name, chat=chat is not None, stream=wanted.stream)
        echoes = [loaded.tokenizer.decode(list(row.tokens)) for row in rows] if wanted.echo else []
        made = Texts(batcher, rows, wanted, writers, limits.request_s, chat.end_ids if chat else frozenset())
        if wanted.stream:
            begins = [""] * len(rows) if chat else echoes
            return EventStream(made, _events(made, wanted, begins, answer))
        try:
            found = await _unless_gone(request, made.whole())
        finally:
            made.close()
        if found is None:
            return Response(status_code=499)  # nobody reads it
        begins = echoes or [""] * len(rows)
        choices = [
            answer.choice(n, begins[n] + text, finish, begins=True) for n, (text, finish) in enumerate(found)
        ]
        return JSONResponse(answer.body(choices, made.usage()))

    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_exception_handler(ShoalError, _refuse)
    return app


class Texts:
    """The texts of one request as they are made; `close` gives up what is not made yet."""

    def __init__(
        self,
        batcher: Batcher,
        rows: list[GeneratedRow],
        wanted: CompletionRequest,
        writers: list[Writer],
        limit_s: float,
        end_ids: frozenset[int] = frozenset(),  # tokens that end a text, beside the end of a document
    ) -> None:
        self._batcher, self._rows, self._writers, self._end_ids = batcher, rows, writers, end_ids
        self._queue: asyncio.Queue[tuple[int, int | Exception | None]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        sampling = wanted.sampling()
        self._tickets = [
            Ticket(row, sampling, partial(self._deliver, loop, index)) for index, row in enumerate(rows)
        ]
        self._made = [0] * len(rows)
        batcher.submit(self._tickets)
        late = LateError(f"the time limit of {limit_s:g} s is over", hint="ask for fewer tokens")
        self._timer = loop.call_later(limit_s, self._queue.put_nowait, (0, late))

    def close(self) -> None:
        """Stop what is under way."""
        self._timer.cancel()
        self._batcher.cancel(self._tickets)

    def usage(self) -> dict[str, int]:
        """Return the count of tokens so far; a prompt counts once."""
        prompts = {row.prompt: len(row.tokens) for row in self._rows}
        return usage(sum(prompts.values()), sum(self._made))

    async def whole(self) -> list[tuple[str, str]]:
        """Return (text, why it ended) of each row."""
        texts, ends = [""] * len(self._rows), [""] * len(self._rows)
        async for index, text, finish in self.pieces():
            texts[index] += text
            ends[index] = finish or ends[index]
        return list(zip(texts, ends, strict=True))

    async def pieces(self) -> AsyncGenerator[tuple[int, str, str | None], None]:
        """Yield (row, text, why it ended or None); an error of the server or the time limit is raised."""
        left = set(range(len(self._rows)))
        while left:
            index, item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if index not in left:  # a token that was under way when a stop text was found
                continue
            text, finish = self._take(index, item)
            if finish:
                left.remove(index)
            if text or finish:
                yield index, text, finish

    def _take(self, index: int, token: int | None) -> tuple[str, str | None]:
        writer, ticket = self._writers[index], self._tickets[index]
        if token is None or token in self._end_ids:
            self._batcher.cancel([ticket])
            text = writer.end()
            whole = token is None and self._made[index] == ticket.row.max_tokens and not writer.stopped
            return text, "length" if whole else "stop"
        self._made[index] += 1
        text = writer.push(token)
        if writer.stopped:
            self._batcher.cancel([ticket])
        return text, "stop" if writer.stopped else None

    def _deliver(self, loop: asyncio.AbstractEventLoop, index: int, item: int | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has stopped, and nobody waits
            loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))


class LateError(ShoalError):
    """An answer took longer than one may."""


class EventStream(StreamingResponse):
    """Server-sent events; what they tell of is given up as soon as the client has left."""

    def __init__(self, made: Texts, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._made = made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._made.close()


async def _events(
    made: Texts, wanted: CompletionRequest, begins: list[str], answer: Answer
) -> AsyncGenerator[str, None]:
    def event(body: dict[str, Any]) -> str:
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    for index, text in enumerate(begins):
        yield event(answer.body([answer.choice(index, text, None, begins=True)]))
    try:
        async for index, text, finish in made.pieces():
            yield event(answer.body([answer.choice(index, text, finish)]))
    except ShoalError as error:  # the status has been sent: the stream itself has to tell
        yield event(failure(str(error), "server_error"))
        return
    if wanted.stream_options is not None and wanted.stream_options.include_usage:
        yield event(answer.body([], made.usage()))
    yield "data: [DONE]\n\n"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` does, or None once the client has left: it is cancelled then."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    job, gone = asyncio.create_task(work), asyncio.create_task(leaving())
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await job if job.done() else None
    finally:
        for task in (job, gone):
            task.cancel()


def _check_name(wanted: str | None, name: str) -> None:
    if wanted not in (None, name):
        raise HTTPException(404, f"the model {wanted!r} is not here; this server has {name!r}")


async def _refuse_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    sentences = []
    for one in error.errors():
        field = ".".join(str(part) for part in one["loc"][1:2]) or "the body"
        sentences.append(f"{field}: {one['msg']}")
    told = "; ".join(list(dict.fromkeys(sentences))[:3])
    return JSONResponse(failure(told), 400)


async def _refuse_path(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse(failure(str(error.detail)), error.status_code)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    statuses = ((BusyError, 429), (LateError, 408), (GoneError, 503), (InputError, 400))
    status = next((status for kind, status in statuses if isinstance(error, kind)), 500)
    return JSONResponse(
        failure(str(error), "invalid_request_error" if status < 500 else "server_error"), status
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: Path | None) -> str:
    """Return the word in a file; an InputError says what is wrong with it."""
    if path is None:
        return ""
    try:
        token = path.read_text("ascii").strip()
        if path.stat().st_mode & 0o077:
            print(f"warning: others on this machine may read {path}: chmod 600 {path}", file=sys.stderr)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} holds no token: {error}") from error
    if len(token) < _SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise InputError(
            f"{path} holds no token of {_SHORTEST_TOKEN} characters or more, without blanks",
            hint=f"python -c 'import secrets; print(secrets.token_hex())' > {path}",
        )
    return token
