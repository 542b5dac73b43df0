"""What kind of text a file holds: by its name where that is certain, else by its first bytes."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from shoal.errors import DataError, InputError

BY_NAME = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
JSON = (".json", ".json.gz", ".json.zst")
# Files of web pages, where pages are wanted. A web archive is recognised by its first bytes under any name.
HTML, WARC = (".html", ".htm", ".xhtml"), (".warc", ".warc.gz")
# Taken from a folder without --ext, with the above and names without a suffix. docs/prepare.md lists them.
TEXT_SUFFIXES = {
    ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".py", ".pyi", ".pyx", ".c", ".h",
    ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh", ".m", ".rs", ".go", ".java", ".kt", ".scala",
    ".swift", ".cs", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".rb", ".pl", ".pm", ".php", ".lua", ".r",
    ".jl", ".hs", ".ml", ".ex", ".exs", ".erl", ".clj", ".lisp", ".el", ".f90", ".f", ".sh", ".bash",
    ".ps1", ".sql", ".cmake", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".proto",
}  # fmt: skip
BUFFER = 1 << 18
_LOOK = 8192
_MAX_LINE = 32 << 20
_MAX_BLANK = 100
_PACKED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
_PARQUET, _WARC = b"PAR1", b"WARC/1."
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class NotTextError(DataError):
    """A file that holds no text; `label` is what a count of such files calls them."""

    def __init__(self, label: str, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.label = label


def is_candidate(path: Path, ext: tuple[str, ...], *, pages: bool = False) -> bool:
    """Tell whether a folder's file is looked at, by its name: those of --ext, or text-like ones and pages."""
    name = path.name.lower()
    if ext:
        return name.endswith(tuple(f".{one}" for one in ext))
    known = (*BY_NAME, *JSON, *(HTML + WARC if pages else ()))
    return not path.suffix or path.suffix.lower() in TEXT_SUFFIXES or name.endswith(known)


def has_pages(kind: str) -> bool:
    """Tell whether files of this kind hold web pages, which `web.pages` reads."""
    return kind.startswith(("html", "warc"))


def find_kind(path: Path, text_key: str, *, pages: bool = False) -> str:
    """Return the kind of a file; a NotTextError says what it is instead of text.

    With `pages`, HTML files and web archives hold pages, to be extracted. Without, HTML is plain text.
    """
    name = path.name.lower()
    known = next((kind for ending, kind in BY_NAME.items() if name.endswith(ending)), None)
    if known or (pages and name.endswith(HTML)):
        return known or "html"
    is_json = name.endswith(JSON)
    try:
        with path.open("rb") as file:
            head = file.read(_LOOK)
            packed = next((ending for magic, ending in _PACKED.items() if head.startswith(magic)), "")
            if _is_warc(head, packed):
                if pages:
                    return f"warc{packed}"
                message = f"{path} is a web archive (WARC)"
                raise NotTextError("web archive", message, "--web extracts the text of its pages")
            looked_at = packed or is_json or path.suffix.lower() not in TEXT_SUFFIXES
            if looked_at and _is_json_lines(file, packed, text_key):
                return f"jsonl{packed}"
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint="check its permissions") from error
    if head.startswith(_PARQUET):
        return "parquet"
    if packed:
        message = f"{path} is compressed and holds no JSON lines with the key {text_key!r}"
        raise NotTextError("compressed file", message, "decompress it first")
    if is_json:
        raise NotTextError(
            "plain JSON file",
            f"{path} is not JSON lines: one object a line, with the text under {text_key!r}",
            f"make lines of an array with jq -c '.[]' {path.name} > {path.stem}.jsonl; name another key with "
            "--text-key; a copy that ends in .txt is taken as plain text",
        )
    if (zero := head.find(b"\0")) >= 0:
        like = " (it looks like UTF-16)" if head.startswith(_UTF16) else ""
        message = f"{path} is a binary file: byte {zero} is zero{like}"
        raise NotTextError("binary file", message, "convert it to UTF-8 text first, or leave it out")
    return "text"


def decompressed(raw: BinaryIO, kind: str) -> BinaryIO:
    """Return the stream of plain bytes behind a file whose kind ends in .gz or .zst, or the file itself."""
    if kind.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER)
    if kind.endswith(".zst"):
        return io.BufferedReader(pa.input_stream(raw, compression="zstd"), BUFFER)
    return raw


def _is_warc(head: bytes, packed: str) -> bool:
    """Tell whether a file begins with a WARC record (ISO 28500), as it is or compressed with gzip."""
    if packed == ".gz":
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, len(_WARC))
    return head.startswith(_WARC)


def _is_json_lines(raw: BinaryIO, packed: str, text_key: str) -> bool:
    """Tell whether the first line is a whole JSON object, one with the text or the first of several."""
    raw.seek(0)
    try:
        file = decompressed(raw, packed)
        lines = (file.readline(_MAX_LINE) for _ in range(_MAX_BLANK))
        first = json.loads(next(filter(bytes.strip, lines), b"").decode("utf-8-sig"))
        return isinstance(first, dict) and (text_key in first or file.read(_LOOK).lstrip()[:1] == b"{")
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return False
