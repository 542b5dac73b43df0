"""Fetched pages on disk: WARC files, and before a shard is whole a spool of records beside a journal.

A page counts as fetched once its line is in the journal. Each line names the place and digest of its record
in the spool, so that whatever a kill or a power cut left behind it is found and removed.
"""

from __future__ import annotations

import hashlib
import json
import uuid
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from shoal.data.prepare.web.client import Visit, labelled
from shoal.runtime.files import atomic_write

_KEPT_HEADERS = ("Content-Type", "Content-Language", "Last-Modified")
_LEVEL = 4  # of zlib: 60 % of the time of level 6, and 3 % more bytes


def manifest_line(visit: Visit) -> dict[str, Any]:
    """Return what the manifest tells of a URL."""
    answer = visit.answer
    return {
        "url": visit.url,
        "final_url": visit.final_url,
        "status": visit.status,
        "reason": visit.reason,
        "detail": visit.detail,
        "bytes": len(answer.body) if answer else 0,
        "content_type": answer.headers.get("Content-Type", "")[:200] if answer else "",
        "seconds": visit.seconds,
        "redirects": visit.redirects,
        "attempts": visit.attempts,
        "digest": answer.digest if answer else "",
    }


def warc_record(visit: Visit, now: datetime | None = None) -> bytes:
    """Return a response record of WARC/1.1 (ISO 28500:2017) as one gzip member.

    The body is stored without the encodings of its transfer, under the headers that tell of its content.
    """
    answer = visit.answer
    assert answer is not None, visit.url
    kept = [(name, answer.headers.get(name)) for name in _KEPT_HEADERS]
    lines = ["HTTP/1.1 200 OK", *(f"{name}: {' '.join(value.split())}" for name, value in kept if value)]
    lines += [f"Content-Length: {len(answer.body)}", "", ""]
    http = "\r\n".join(lines).encode("utf-8", "replace")
    block = hashlib.sha1(http)
    block.update(answer.body)
    fields = [
        "WARC/1.1",
        "WARC-Type: response",
        f"WARC-Record-ID: <urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{visit.url} {answer.digest}')}>",
        f"WARC-Date: {now or datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        f"WARC-Target-URI: {visit.final_url}",
        f"WARC-Source-URI: {visit.url}",
        f"WARC-Payload-Digest: {answer.digest}",
        f"WARC-Block-Digest: {labelled(block.digest())}",
        "Content-Type: application/http; msgtype=response",
        f"Content-Length: {len(http) + len(answer.body)}",
    ]
    packer = zlib.compressobj(_LEVEL, wbits=31)
    parts = [packer.compress(part) for part in ("\r\n".join([*fields, "", ""]).encode(), http, answer.body)]
    return b"".join([*parts, packer.compress(b"\r\n\r\n"), packer.flush()])


def shard_path(folder: Path, index: int, ending: str) -> Path:
    """Return the name of one of a shard's files."""
    return folder / f"{index:05}.{ending}"


class Shard:
    """A run of URLs in work. What a former process fetched of it is taken over."""

    def __init__(self, folder: Path, index: int, urls: Sequence[str]) -> None:
        self.urls = urls
        self._folder, self._index = folder, index
        self._entries: dict[int, dict[str, Any]] = {}
        self._spool = shard_path(folder, index, "spool").open("a+b")
        self._journal = shard_path(folder, index, "journal").open("a+b")
        self._take_over()

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing is missing."""
        return len(self._entries) == len(self.urls)

    @property
    def missing(self) -> list[int]:
        """Return the places in `urls` that are still to be fetched."""
        return [at for at in range(len(self.urls)) if at not in self._entries]

    def add(self, at: int, line: dict[str, Any], record: bytes) -> None:
        """Store what became of a URL; when this returns, a kill of the process loses nothing of it."""
        start = self._spool.seek(0, 2)
        self._spool.write(record)
        self._spool.flush()
        entry = {"at": at, "start": start, "length": len(record), "xxh3": _hash(record), "line": line}
        self._journal.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._journal.flush()
        self._entries[at] = entry

    def commit(self) -> None:
        """Write the WARC file and its manifest, in the order of the URLs; then the spool goes."""
        entries = [self._entries[at] for at in range(len(self.urls))]
        with atomic_write(shard_path(self._folder, self._index, "jsonl")) as out:
            out.writelines(
                json.dumps(entry["line"], ensure_ascii=False).encode("utf-8", "replace") + b"\n"
                for entry in entries
            )
        with atomic_write(shard_path(self._folder, self._index, "warc.gz")) as out:
            for entry in entries:
                self._spool.seek(entry["start"])
                out.write(self._spool.read(entry["length"]))
        self.close()
        remove_work(self._folder, self._index)

    def close(self) -> None:
        """Close the files; they can be taken over again."""
        self._spool.close()
        self._journal.close()

    def _take_over(self) -> None:
        """Read the journal up to the first line that is damaged, or whose record is; cut both files there."""
        journal_end = spool_end = 0
        self._journal.seek(0)
        for text in self._journal:
            entry = _entry(text, len(self.urls))
            if entry is None:
                break
            self._spool.seek(entry["start"])
            if _hash(self._spool.read(entry["length"])) != entry["xxh3"]:
                break
            self._entries[entry["at"]] = entry
            journal_end += len(text)
            spool_end = entry["start"] + entry["length"]
        self._journal.truncate(journal_end)
        self._spool.truncate(spool_end)


def remove_work(folder: Path, index: int) -> None:
    """Remove what is left of the work on a whole shard."""
    for ending in ("journal", "spool"):
        shard_path(folder, index, ending).unlink(missing_ok=True)


def _hash(record: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(record)


def _entry(text: bytes, count: int) -> dict[str, Any] | None:
    """Return an entry of the journal, None where the line is not whole."""
    try:
        entry = json.loads(text) if text.endswith(b"\n") else {}
        is_whole = 0 <= entry["at"] < count and min(entry["start"], entry["length"]) >= 0 and "line" in entry
    except (ValueError, KeyError, TypeError):
        return None
    return entry if is_whole and "xxh3" in entry else None
