"""A web server with good and bad pages for tests and benchmarks, in a process of its own.

`python -m tests.data.web_server` prints its port and serves until its standard input ends. /_requests tells
how often each path was asked for. What robots.txt says depends on the name in the Host header.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import os
import random
import subprocess
import sys
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote

HTML = "text/html; charset=utf-8"
PAGE = "<html><head><title>Page {}</title></head><body><p>This is page {}.</p>{}</body></html>"
ROBOTS = {
    "norules": "404 Not Found",
    "broken": "503 Service Unavailable",
    "silent": "",
    "patient": "User-agent: *\nCrawl-delay: 0.3\n",
    "huge": "User-agent: *\nDisallow: /private\n" + "# filler\n" * 200_000 + "Disallow: /ok\n",
    "binary": "\x00\x01\xff" * 1000,
}
DEFAULT_ROBOTS = "User-agent: *\nDisallow: /private\n\nUser-agent: other\nDisallow: /\n"


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def requests(self) -> Counter[str]:
        with urllib.request.urlopen(self.url("/_requests")) as answer:
            return Counter(json.load(answer))


@contextmanager
def serving() -> Iterator[Server]:
    """Run the server in a process of its own during the block."""
    command = [sys.executable, "-m", "tests.data.web_server"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Server(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class Site:
    """Answers by path."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.now = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while start := await reader.read(1):
                if start == b"\x16":  # TLS
                    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    return
                head = start + await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
                host = fields.get(b"Host", b"").decode().partition(":")[0].partition(".")[0]
                self.agent = fields.get(b"User-Agent", b"").decode()
                if path != "/_requests":
                    self.requests[path] += 1
                await self.answer(path, host, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, host: str, writer: asyncio.StreamWriter) -> None:
        first, _, rest = path.strip("/").partition("/")
        if path == "/robots.txt":
            text = ROBOTS.get(host, DEFAULT_ROBOTS)
            if not text:
                await asyncio.sleep(3600)
            status = text if text[:3].isdigit() else "200 OK"
            send(writer, text.encode("latin-1"), status=status, kind="text/plain")
        elif path == "/_requests":
            send(writer, json.dumps(self.requests).encode(), kind="application/json")
        elif path == "/agent":
            send(writer, self.agent.encode())
        elif handler := getattr(self, f"do_{first.replace('-', '_')}", None):
            await handler(writer, rest)
        else:
            send(writer, b"no such page", status="404 Not Found")

    async def do_ok(self, writer, rest):
        send(writer, PAGE.format(rest, rest, "").encode())

    async def do_large(self, writer, rest):
        send(writer, PAGE.format(rest, rest, words()).encode())

    async def do_later(self, writer, rest):
        """Send a page after a while; count how many are asked for at once."""
        self.now += 1
        self.requests["most at once"] = max(self.requests["most at once"], self.now)
        await asyncio.sleep(0.05)
        self.now -= 1
        await self.do_ok(writer, rest)

    async def do_flaky(self, writer, rest):
        again = self.requests[f"/flaky/{rest}"] > 1
        send(
            writer,
            b"<p>good</p>" if again else b"",
            status="200 OK" if again else "500 Internal Server Error",
        )

    async def do_broken(self, writer, rest):
        send(writer, b"", status="500 Internal Server Error")

    async def do_busy(self, writer, rest):
        fields = f"Retry-After: {rest}\r\n"
        again = self.requests[f"/busy/{rest}"] > 1
        send(
            writer,
            b"<p>good</p>",
            "" if again else fields,
            status="200 OK" if again else "429 Too Many Requests",
        )

    async def do_redirect(self, writer, rest):
        send(writer, b"moved", f"Location: {unquote(rest)}\r\n", status="302 Found")

    async def do_nowhere(self, writer, rest):
        send(writer, b"moved", status="302 Found")

    async def do_loop(self, writer, rest):
        send(writer, b"", f"Location: /loop/{1 - int(rest)}\r\n", status="301 Moved Permanently")

    async def do_on(self, writer, rest):
        send(writer, b"", f"Location: {int(rest) + 1}\r\n", status="307 Temporary Redirect")

    async def do_silence(self, writer, rest):
        await asyncio.sleep(3600)

    async def do_drip(self, writer, rest):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def do_endless(self, writer, rest):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
        while True:
            writer.write(b"<p>and so on</p>" * 4096)
            await writer.drain()

    async def do_bomb(self, writer, rest):
        """Send gzip data of a quarter of a gigabyte in a megabyte."""
        send(writer, await asyncio.to_thread(bomb), "Content-Encoding: gzip\r\n")

    async def do_gzip(self, writer, rest):
        send(writer, gzip.compress(PAGE.format(rest, rest, "").encode()), "Content-Encoding: gzip\r\n")

    async def do_wrong_gzip(self, writer, rest):
        send(writer, b"this is no gzip data", "Content-Encoding: gzip\r\n")

    async def do_announced(self, writer, rest):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 99999999999\r\n\r\n<p>")
        await writer.drain()
        await asyncio.sleep(3600)

    async def do_binary(self, writer, rest):
        send(writer, bytes(range(256)), kind=rest or "application/octet-stream")

    async def do_charset(self, writer, rest):
        send(writer, "<p>Käse</p>".encode("latin-1"))

    async def do_empty(self, writer, rest):
        send(writer, b"")

    async def do_cut(self, writer, rest):
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1000\r\n\r\n<p>only this"
        )
        await writer.drain()
        writer.close()

    async def do_garbage(self, writer, rest):
        writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        await writer.drain()
        writer.close()

    async def do_hangup(self, writer, rest):
        writer.close()

    async def do_headers(self, writer, rest):
        send(writer, b"<p>x</p>", f"X-Long: {'a' * 100_000}\r\n")

    async def do_odd(self, writer, rest):
        """Send a header whose bytes are no text."""
        odd = b"Content-Type: text/html; x=\xff\r\nLocation: /\xff\xfe\xed\xa0\x80" + b"\x01" * (
            rest == "control"
        )
        status = b"302 Found" if rest == "redirect" else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\n" + odd + b"\r\nContent-Length: 3\r\n\r\n<p>")

    async def do_private(self, writer, rest):
        await self.do_ok(writer, rest)


@functools.cache
def words() -> str:
    """Return about 50 kB of text that compresses as text does."""
    rng = random.Random(1)
    known = ["".join(rng.choices("aeioulnrst", k=rng.randint(2, 9))) for _ in range(3000)]
    return "".join(f"<p>{' '.join(rng.choices(known, k=80))}.</p>\n" for _ in range(95))


@functools.cache
def bomb() -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()


def send(writer, body: bytes, fields: str = "", status: str = "200 OK", kind: str = HTML) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def main() -> None:
    site = Site()
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()
    os._exit(0)  # whoever still waits for an answer gets none


if __name__ == "__main__":
    asyncio.run(main())
