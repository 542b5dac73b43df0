"""Fetch a list of URLs into WARC files and a manifest; a run that was stopped or killed is continued."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shoal.data.prepare.stages.documents import require
from shoal.data.prepare.web.address import Lookup
from shoal.data.prepare.web.archive import Shard, manifest_line, remove_work, shard_path, warc_record
from shoal.data.prepare.web.client import Client, Fetch
from shoal.data.prepare.web.hosts import Hosts
from shoal.errors import DataError, counted
from shoal.runtime.files import alone_in, atomic_write, disk_error, read_json, write_json

SHARD_URLS = 1000
_OPEN_SHARDS = 8  # in work at once, so that a slow host does not hold up the rest
_PACE = {"concurrency", "per_host", "delay"}  # settings that may change between two runs
_SAY_EVERY_S = 1.0


@dataclass(frozen=True)
class Progress:
    """How far the fetching is: URLs done (by former runs, too) of all; rate and share of this run."""

    done: int
    total: int
    pages_per_s: float
    ok_share: float

    def __str__(self) -> str:
        left = f"{self.done:,} of {counted(self.total, 'page')}, {self.total - self.done:,} left"
        return f"{left}, {self.pages_per_s:,.1f} pages/s, {self.ok_share:.0%} ok"


@dataclass(frozen=True)
class Fetched:
    """The result: WARC files in order, the manifest (a JSON object for each URL), URLs by reason."""

    warcs: list[Path]
    manifest: Path
    counters: dict[str, int]


Say = Callable[[Progress], None]


def fetch_all(
    urls: Iterable[str],
    folder: Path,
    settings: Fetch,
    say: Say | None = None,
    lookup: Lookup = socket.getaddrinfo,
) -> Fetched:
    """Fetch all URLs (normalised, no duplicates) into `folder`, in its own event loop.

    A folder that holds a part of the same list is continued, a finished one is read. Raises DataError where
    it holds another list or other settings, where there is no URL, and where no page could be fetched.
    `say` is called about once a second. KeyboardInterrupt leaves everything ready to be continued.
    """
    require("aiohttp")
    with alone_in(folder):
        for left in folder.glob(".*.tmp"):  # by a run that was killed
            left.unlink()
        total = _take_list(urls, folder, settings)
        manifest = folder / "manifest.jsonl"
        if not manifest.exists():
            try:
                asyncio.run(_Run(folder, settings, total, say or (lambda progress: None), lookup).run())
            except BaseExceptionGroup as group:
                first = group.exceptions[0]
                raise (disk_error(first, folder) if isinstance(first, OSError) else first) from None
            _join_manifests(folder, manifest, total)
        for part in folder.glob("[0-9]*.jsonl"):
            part.unlink()
        warcs = [path for path in sorted(folder.glob("*.warc.gz")) if path.stat().st_size]
        counters = _count(manifest)
    if not counters.get("ok"):
        reason, number = max(counters.items(), key=lambda item: item[1])
        raise DataError(
            f"none of {counted(total, 'page')} could be fetched, {number:,} of them because of: {reason}",
            hint=f"{manifest} has a line for each URL",
        )
    return Fetched(warcs, manifest, counters)


def _take_list(urls: Iterable[str], folder: Path, settings: Fetch) -> int:
    """Write list and settings into a new folder, or compare them with those there; return the length."""
    digest, total, facts = xxhash.xxh3_128(), 0, folder / "fetch.json"
    known = read_json(facts, "list of URLs") if facts.exists() else None
    with atomic_write(folder / "urls.txt") as out:
        for url in urls:
            assert not set(url) & set(" \r\n"), url
            line = f"{url}\n".encode()
            out.write(line)
            digest.update(line)
            total += 1
        chosen = settings.model_dump(mode="json", exclude=_PACE)
        new = {"urls": total, "digest": digest.hexdigest(), "shard_urls": SHARD_URLS, "settings": chosen}
        if not total:
            raise DataError("there are no URLs to fetch", hint="check the input and the block lists")
        if known is not None and known != new:
            raise DataError(
                f"{folder} was begun with another list or other settings: {_difference(known, new)}",
                hint="choose another folder, or remove this one",
            )
    write_json(facts, new)
    return total


def _difference(known: dict[str, Any], new: dict[str, Any]) -> str:
    """Say in words what differs."""
    old = known.get("settings", {})
    pairs = [(name, old.get(name), value) for name, value in new["settings"].items()]
    words = [f"{name} was {before}, now {value}" for name, before, value in pairs if before != value]
    if known.get("digest") != new["digest"]:
        words.append(
            f"the list had {counted(known.get('urls', 0), 'URL')}, now {new['urls']:,}, or other ones"
        )
    return "; ".join(words)


class _Run:
    """The work on one list, in one event loop."""

    def __init__(self, folder: Path, settings: Fetch, total: int, say: Say, lookup: Lookup) -> None:
        self._folder, self._settings, self._total = folder, settings, total
        self._say, self._lookup = say, lookup
        self._open: set[Shard] = set()
        self._done = self._mine = self._ok = 0
        self._began = self._said = time.monotonic()

    async def run(self) -> None:
        """Fetch until every shard is whole."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)  # a server's broken TLS is no traceback
        self._hosts = Hosts(self._settings.per_host, self._settings.delay)
        self._shards = self._parts()
        slots = asyncio.Semaphore(self._settings.concurrency)
        lookups = ThreadPoolExecutor(self._settings.concurrency, thread_name_prefix="lookup")
        self._client = Client(self._settings, self._hosts, lookups, self._lookup)
        try:
            async with asyncio.TaskGroup() as group:
                await self._refill()
                while await slots.acquire() and (item := await self._hosts.get()) is not None:
                    group.create_task(self._one(slots, *item))
        finally:
            await self._client.close()
            lookups.shutdown(wait=False, cancel_futures=True)
            for shard in self._open:
                shard.close()
        self._tell()

    def _parts(self) -> Iterator[Shard]:
        """Yield the shards that are not whole yet."""
        with (self._folder / "urls.txt").open(encoding="utf-8") as file:
            for index in itertools.count():
                urls = [line.rstrip("\n") for line in itertools.islice(file, SHARD_URLS)]
                if not urls:
                    return
                if shard_path(self._folder, index, "warc.gz").exists():
                    remove_work(self._folder, index)
                    self._done += len(urls)
                else:
                    yield Shard(self._folder, index, urls)

    async def _refill(self) -> None:
        """Open more shards; stop where none is left."""
        while len(self._open) < _OPEN_SHARDS and (shard := next(self._shards, None)):
            self._open.add(shard)
            self._done += len(shard.urls) - len(shard.missing)
            for at in shard.missing:
                host = self._client.host_of(shard.urls[at])
                self._hosts.put(host, (host, shard, at))
            if shard.is_whole:
                await self._close(shard)
        if not self._open:
            self._hosts.stop()

    async def _one(self, slots: asyncio.Semaphore, host: str, shard: Shard, at: int) -> None:
        """Fetch one URL and store what became of it; the last one of a shard makes it whole."""
        visit = await self._client.fetch(shard.urls[at])
        record = b""
        if visit.answer:
            record = await asyncio.to_thread(warc_record, visit)
        shard.add(at, manifest_line(visit), record)
        self._done, self._mine, self._ok = self._done + 1, self._mine + 1, self._ok + bool(record)
        if time.monotonic() - self._said > _SAY_EVERY_S:
            self._tell()
        self._hosts.done(host)
        slots.release()
        if shard.is_whole:
            await self._close(shard)
            await self._refill()

    async def _close(self, shard: Shard) -> None:
        await asyncio.to_thread(shard.commit)
        self._open.discard(shard)

    def _tell(self) -> None:
        self._said = time.monotonic()
        rate = self._mine / max(self._said - self._began, 1e-3)
        self._say(Progress(self._done, self._total, rate, self._ok / max(self._mine, 1)))


def _join_manifests(folder: Path, manifest: Path, total: int) -> None:
    """Write one manifest from those of the shards."""
    parts = [shard_path(folder, index, "jsonl") for index in range(-(-total // SHARD_URLS))]
    with atomic_write(manifest) as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out)


def _count(manifest: Path) -> dict[str, int]:
    """Count the URLs by reason."""
    counters = Counter[str]()
    with manifest.open(encoding="utf-8") as file:
        for line in file:
            counters[json.loads(line)["reason"]] += 1
    return dict(sorted(counters.items()))
