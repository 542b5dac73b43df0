"""A server inside this process, on a free port, whose model may be slowed down or broken."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx

from shoal.infer.load import TextModel
from shoal.infer.serve.batcher import Batcher
from shoal.infer.serve.server import Address, Limits, Server, build_server, run_web


class Running:
    """A server that answers at `url`."""

    def __init__(self, server: Server, batcher: Batcher, port: int) -> None:
        self.server, self.batcher, self.port = server, batcher, port
        self.url = f"http://127.0.0.1:{port}"
        self.steps = 0  # tokens that were computed for all live rows
        self.step_s = 0.0
        self.fails = False
        self._goal = float("inf")  # steps
        honest = batcher._engine.step

        def step(chosen: list[int]) -> Any:
            if self.fails:
                raise RuntimeError("out of everything")
            time.sleep(self.step_s)
            while self.steps >= self._goal:
                time.sleep(0.01)
            self.steps += 1
            return honest(chosen)

        batcher._engine.step = step  # type: ignore[method-assign]

    def hold(self, after: float) -> None:
        """Let the model compute so many more tokens for all live rows, then wait."""
        self._goal = self.steps + after

    def post(self, **body: Any) -> httpx.Response:
        """Ask for a completion."""
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many more tokens have been computed."""
        self.wait_for(lambda goal=self.steps + count: self.steps >= goal)

    @staticmethod
    def wait_for(condition: Callable[[], bool]) -> None:
        """Wait for at most a minute."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def connect(self, **body: Any) -> socket.socket:
        """Ask on a socket of one's own."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return client

    def exchange(self, data: bytes) -> bytes:
        """Send bytes; return all that comes back until the server ends the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as client:
            client.sendall(data)
            return b"".join(iter(lambda: client.recv(65536), b""))


@contextmanager
def serving(
    loaded: TextModel, limits: Limits | None = None, token: str = "", send_bytes: int = 0
) -> Iterator[Running]:
    """Serve a model on a thread until the block ends."""
    server, batcher = build_server(loaded, "run", Address(token=token), limits or Limits())
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    if send_bytes:  # what the system takes off our hands for a client that does not read
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    running = Running(server, batcher, listener.getsockname()[1])
    threads = [
        threading.Thread(target=run_web, args=(server, batcher, listener)),
        threading.Thread(target=batcher.run),
    ]
    fallen: list[object] = []
    hook, threading.excepthook = threading.excepthook, fallen.append
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        running.hold(after=float("inf"))
        server.should_exit = True
        for thread in threads:
            thread.join()
        threading.excepthook = hook
    assert fallen == []


def events(response: httpx.Response) -> list[Any]:
    """Return the objects of a stream, which ends with [DONE] or an error."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    if "error" not in lines[-1]:
        assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
