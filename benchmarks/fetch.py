"""Pages a second of `fetch_all` from a local server, 32 at once, and its share of what plain aiohttp reaches.

The server is a process of its own. Pages have about 50 kB of random words, and all have one host: delays are
switched off, robots.txt is obeyed, and every page ends in a WARC file and the manifest. The peer is aiohttp
alone: the same pages by `session.get` in tasks behind a semaphore of 32, without robots.txt, limits, retries,
or anything on disk.

    python -m benchmarks.fetch [--pages 4000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import write_record
from shoal.data.prepare.web.client import Fetch
from shoal.data.prepare.web.fetch import fetch_all
from tests.data.web_server import serving

AT_ONCE = 32
LEAST_PAGES_PER_S = 200.0


def shoal(urls: list[str], folder: Path) -> float:
    """Return the seconds of Shoal."""
    settings = Fetch(concurrency=AT_ONCE, per_host=AT_ONCE, delay=0.0, allow_private=True)
    began = time.monotonic()
    counters = fetch_all(urls, folder, settings).counters
    seconds = time.monotonic() - began
    assert counters == {"ok": len(urls)}, counters
    return seconds


async def peer(urls: list[str]) -> float:
    """Return the seconds of aiohttp."""
    import aiohttp

    places = asyncio.Semaphore(AT_ONCE)

    async def get(session: aiohttp.ClientSession, url: str) -> int:
        async with places, session.get(url) as answer:
            return len(await answer.read())

    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        sizes = await asyncio.gather(*(get(session, url) for url in urls))
    assert min(sizes) > 40_000, min(sizes)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pages", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    wish = parser.parse_args()
    rates: dict[str, list[float]] = {"shoal": [], "aiohttp": []}
    with serving() as server, tempfile.TemporaryDirectory() as name:
        for repeat in range(wish.repeats):
            urls = [server.url(f"/large/{repeat}-{n}") for n in range(wish.pages)]
            rates["shoal"].append(round(wish.pages / shoal(urls, Path(name) / str(repeat)), 1))
            rates["aiohttp"].append(round(wish.pages / asyncio.run(peer(urls)), 1))
            print({system: values[-1] for system, values in rates.items()}, flush=True)
    medians = {system: statistics.median(values) for system, values in rates.items()}
    figures = {
        "pages": wish.pages,
        "at_once": AT_ONCE,
        "pages_per_s": rates,
        "median_pages_per_s": medians,
        "ratio_to_aiohttp": round(medians["shoal"] / medians["aiohttp"], 2),
    }
    write_record("fetch", figures)
    if medians["shoal"] < LEAST_PAGES_PER_S:
        sys.exit(f"error: {medians['shoal']} pages/s, fewer than {LEAST_PAGES_PER_S}")


if __name__ == "__main__":
    main()
