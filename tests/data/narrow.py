"""Ranges of documents for tests of deduplication, and jobs that run in the test's own process."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from shoal.data.prepare.dedup.against import write_range
from shoal.data.prepare.dedup.find import find_duplicates
from shoal.data.prepare.dedup.minhash import Signer
from shoal.data.prepare.dedup.ranges import RangeFiles
from shoal.data.prepare.dedup.settings import DedupSettings

SENTENCES = {
    "english": "the quick brown fox jumps over the lazy dog and runs into the dark wood behind the house ",
    "chinese": "今天天气很好我们一起去公园散步看见许多孩子在草地上放风筝老人坐在树下聊天喝茶远处传来音乐声",
    "japanese": "今日は天気がとても良いので公園まで散歩に行きました子供たちは芝生の上で凧を揚げていました",
    "thai": "วันนี้อากาศดีมากเราไปเดินเล่นที่สวนสาธารณะด้วยกันเห็นเด็กๆเล่นว่าวบนสนามหญ้าคนแก่นั่งคุยกันใต้ต้นไม้",
    "mixed": "我们用 Python 写程序处理数据然后把结果保存到 database 里面方便以后查询和分析使用",
}
TEXT = pa.schema([("text", pa.large_string())])


def texts(values: Sequence[str | None]) -> pa.LargeStringArray:
    return pa.array(values, pa.large_string())


def run_jobs(job, spec, items):
    """Do what an engine does, here."""
    module, name = job.split(":")
    worker = getattr(importlib.import_module(module), name)(spec)
    for item in items:
        yield worker.run(item, lambda done: None)


def write_ranges(
    folder: Path,
    documents: Sequence[str | None],
    settings: DedupSettings,
    cuts: Iterable[int],
    rows: int = 50,
) -> list[RangeFiles]:
    """Write documents as ranges that begin at 0 and at the places in `cuts`, in batches of `rows`."""
    signer, ranges, bounds = Signer(settings), [], [0, *cuts, len(documents)]
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        files = RangeFiles(folder / f"{index:03d}.arrow", folder / f"{index:03d}.narrow.arrow")
        batches = [
            pa.record_batch([texts(documents[low : min(low + rows, last)])], schema=TEXT)
            for low in range(first, last, rows)
        ]
        write_range(files, TEXT, batches, signer)
        ranges.append(files)
    return ranges


def decisions(folder: Path, documents, settings=None, cuts=(), rows=50) -> pa.Table:
    """Return the decisions on documents."""
    settings = settings or DedupSettings()
    ranges = write_ranges(folder / "ranges", documents, settings, cuts, rows)
    path = find_duplicates(folder / "dedup", ranges, settings, run_jobs, 1 << 30, lambda line: None)
    return pa.ipc.open_file(path).read_all()


def near(words: Sequence[str], similarity: float, rng: random.Random, fresh: str) -> list[str]:
    """Return a copy of some words whose 5-gram sets have at least about this Jaccard similarity.

    A run of words at the end is replaced: of n 5-grams k go and k come, and (n - k) / (n + k) stay.
    """
    n = len(words) - 4
    k = int(n * (1 - similarity) / (1 + similarity))
    return [*words[: len(words) - k], *(f"{fresh}{rng.randrange(10**6)}" for _ in range(k))]
