"""Links to fetch: lists of URLs, one a line, and dumps of Reddit submissions, as JSON lines.

A file whose first line begins with `{` is a dump, any other one a list. Compression (gzip, bzip2, xz,
Zstandard with windows of up to 2 GiB) is recognised by the first bytes.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, ClassVar

from shoal.data.prepare.stages.documents import StageSettings, require
from shoal.errors import DataError, InputError

_MAX_LINE = 4 << 20  # bytes
_ENDLESS = 256 << 20  # bytes of a line at which a file is given up
_MAGIC = {"gz": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00", "zst": b"\x28\xb5\x2f\xfd"}
_LONGEST_WINDOW = 31  # log2 of bytes; Reddit's dumps were compressed with zstd --long=31
_ESCAPED = (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))  # as Reddit's API does, in this order
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Links(StageSettings):
    """Links of Reddit submissions; lists of URLs are taken as they are."""

    name: ClassVar[str] = "links"
    min_score: int = 3
    """Lowest score (up-votes minus down-votes) of a submission whose link is taken."""
    over_18: bool = False
    """Take links that are marked as over 18, too."""


def find_lists(paths: Sequence[Path]) -> list[Path]:
    """Return the files to read, those of folders in the order of their names; hidden ones are left out.

    Raises InputError where a path does not exist, DataError where a folder has no file.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = (one for one in sorted(path.rglob("*")) if one.is_file())
            found = [p for p in below if not any(s.startswith(".") for s in p.relative_to(path).parts)]
            if not found:
                raise DataError(f"folder {path} holds no files", hint="name a file or folder with URLs")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"there is no file or folder {path}", hint="name a file or folder with URLs")
    return files


def read_links(paths: Sequence[Path], settings: Links, counters: Counter[str]) -> Iterator[str]:
    """Yield the links of all files in order; count them as `links`, and what is left out by its reason.

    Blank lines and comments (`#`) of lists are not counted. Raises DataError where a file is damaged, or
    where there is no link at all.
    """
    for path in find_lists(paths):
        for link, reason in _file_links(path, settings):
            counters[reason or "links"] += 1
            if not reason:
                yield link
    refuse_none_left(counters, "links", "links were found", ", ".join(map(str, paths)))


def refuse_none_left(counters: Counter[str], kept: str, what: str, where: str) -> None:
    """Raise a DataError with the main reason if `counters` say that nothing was kept."""
    if counters[kept]:
        return
    lost = [(number, reason) for reason, number in counters.items() if number]
    if not lost:
        raise DataError(f"no {what} in {where}: there are no URLs in it", hint="write one URL a line")
    number, reason = max(lost)
    total = sum(one for one, _ in lost)
    raise DataError(
        f"no {what} in {where}: all {total:,} were left out, {number:,} of them because of: {reason}",
        hint="check the input and the settings of the stages links and urls",
    )


def _file_links(path: Path, settings: Links) -> Iterator[tuple[str, str]]:
    """Yield (link, "") or ("", reason) for each line of a file."""
    try:
        with path.open("rb") as raw, closing(_plain(raw)) as file:
            lines = _lines(file, path)
            first = next(filter(bytes.strip, lines), b"").removeprefix(b"\xef\xbb\xbf")
            is_dump = first.lstrip().startswith(b"{")
            for line in itertools.chain([first], lines):
                if len(line) > _MAX_LINE:
                    yield "", "line too long"
                elif is_dump and line.strip():
                    yield _submission(line, settings)
                elif (text := line.strip()) and not text.startswith(b"#"):
                    yield _decoded(text)
    except Exception as error:
        # the error of zstd is of a module that may be absent
        if not isinstance(error, _DAMAGED) and type(error).__name__ != "ZstdError":
            raise
        raise DataError(
            f"{path} cannot be read to its end: {error}",
            hint="it is cut short or damaged: copy it again, or leave it out",
        ) from error


def _plain(raw: BinaryIO) -> BinaryIO:
    """Return the stream of plain bytes of a file that may be compressed."""
    head = raw.read(8)
    raw.seek(0)
    kind = next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), "")
    if kind == "zst":
        zstd = require("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
        options = {zstd.DecompressionParameter.window_log_max: _LONGEST_WINDOW}
        return io.BufferedReader(zstd.ZstdFile(raw, options=options))
    if kind == "gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    if kind:
        return io.BufferedReader(bz2.BZ2File(raw) if kind == "bz2" else lzma.LZMAFile(raw))
    return raw


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield each line; of one that is too long one byte more than is allowed, and never more in memory."""
    while line := file.readline(_MAX_LINE + 1):
        yield line
        length, more = len(line), line
        while length > _MAX_LINE and not more.endswith(b"\n") and (more := file.readline(_MAX_LINE)):
            length += len(more)
            if length > _ENDLESS:
                raise DataError(
                    f"{path} has a line of more than {_ENDLESS >> 20} MiB",
                    hint="leave the file out, or write one URL or JSON object a line",
                )


def _decoded(line: bytes) -> tuple[str, str]:
    try:
        return line.decode(), ""
    except UnicodeDecodeError:
        return "", "not UTF-8"


def _submission(line: bytes, settings: Links) -> tuple[str, str]:
    """Return the link of a submission, or the reason to leave it out."""
    try:
        post = json.loads(line.decode())
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except (ValueError, RecursionError):
        return "", "not JSON"
    if not isinstance(post, dict):
        return "", "not a JSON object"
    url, score = post.get("url"), post.get("score")
    if not isinstance(url, str) or not url.strip():
        return "", "no URL"
    if not isinstance(score, int | float):
        return "", "no score"
    if post.get("is_self"):
        return "", "self post"
    if post.get("over_18") and not settings.over_18:
        return "", "over 18"
    if not score >= settings.min_score:  # NaN is a number of JSON, too
        return "", "low score"
    for escaped, plain in _ESCAPED:
        url = url.replace(escaped, plain)
    return url.strip(), ""
