"""Which files hold the text, and the byte ranges into which work on them is cut."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.data.prepare.options import PrepareOptions
from shoal.errors import DataError, InputError, counted, nearest

STDLIB = "stdlib"
KINDS = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_RUN_AGAIN = "run the same command again when nothing writes to the text any more; it starts anew"
_GLOB = frozenset("*?[")


@dataclass(frozen=True)
class SourceFile:
    """One input file. `role` is main, validation or test; size and time tell whether it changed."""

    path: str
    role: str
    kind: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Segment:
    """A part of a file: bytes for text and JSONL, row groups for Parquet, the whole file for the rest."""

    file: int
    start: int
    end: int


@dataclass(frozen=True)
class WorkRange:
    """One unit of work, committed as a whole. `limit` is the number of documents to take, None for all."""

    index: int
    role: str
    num_bytes: int
    segments: tuple[Segment, ...]
    limit: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for another process."""
        return asdict(self)

    @staticmethod
    def from_dict(value: dict[str, Any]) -> WorkRange:
        """Rebuild what `to_dict` gave."""
        segments = tuple(Segment(**segment) for segment in value["segments"])
        return WorkRange(value["index"], value["role"], value["num_bytes"], segments, value["limit"])


def find_sources(options: PrepareOptions) -> list[SourceFile]:
    """List all input files, each role's in sorted order; raise DataError where a role has no text."""
    sources: list[SourceFile] = []
    for role, inputs in (
        ("main", options.inputs),
        ("validation", options.validation),
        ("test", options.test),
    ):
        found = [source for text in inputs for source in _expand(text, role)]
        unique = {source.path: source for source in found}
        ordered = [unique[path] for path in sorted(unique)]
        if inputs and not any(source.size for source in ordered):
            raise DataError(
                f"there is no text in {', '.join(inputs)}: {counted(len(ordered), 'file')}, all empty",
                hint="name files or folders with text in them",
            )
        sources += ordered
    _refuse_overlap(sources)
    return sources


def _expand(text: str, role: str) -> Iterator[SourceFile]:
    """Turn one INPUT (file, folder, glob or `stdlib`) into files."""
    path = Path(text)
    if text == STDLIB and not path.exists():
        yield from _stdlib(role)
    elif path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and _kind(p) and not _hidden(p, path)]
        if not found:
            raise DataError(
                f"folder {text} holds no text files", hint=f"files it may hold: {' '.join(KINDS)}"
            )
        yield from (_source(p, role, _kind(p)) for p in found)
    elif path.exists():
        yield _source(path, role, _kind(path) or _unknown(path))
    elif _GLOB & set(text):
        names = [Path(name) for name in sorted(glob.glob(text, recursive=True))]
        files = [p for p in names if p.is_file()]
        if not files:
            raise DataError(f"no file matches {text}", hint="quote the pattern and check the folder's name")
        yield from (_source(p, role, _kind(p) or _unknown(p)) for p in files)
    else:
        if not path.parent.is_dir():
            raise InputError(
                f"there is no file or folder {text}", hint=f"{path.parent} does not exist either"
            )
        known = [STDLIB, *(p.name for p in path.parent.iterdir() if p.is_dir() or _kind(p))]
        raise InputError(f"there is no file or folder {text}", hint=nearest(path.name, known)[:400])


def _stdlib(role: str) -> Iterator[SourceFile]:
    """List the source files of the running Python's standard library, its tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if not _NOT_CORPUS & set(p.relative_to(root).parts[:-1])]
    if sum(p.stat().st_size for p in files) < 1 << 20:
        raise DataError(f"this Python keeps no source text in {root}", hint="name text files of your own")
    yield from (_source(p, role, "text") for p in files)


def _kind(path: Path) -> str | None:
    """Tell a file's kind by its name."""
    name = path.name.lower()
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)


def _hidden(path: Path, root: Path) -> bool:
    """Tell whether a file or a folder above it (below `root`) starts with a dot."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _unknown(path: Path) -> str:
    """Refuse a file whose kind the name does not tell."""
    raise DataError(
        f"{path} has a name whose kind is unknown", hint=f"rename it to one of: {' '.join(KINDS)}"
    )


def _source(path: Path, role: str, kind: str | None) -> SourceFile:
    """Describe one file."""
    assert kind is not None, path
    try:
        facts = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint="check its permissions") from error
    return SourceFile(str(path.absolute()), role, kind, facts.st_size, facts.st_mtime_ns)


def refuse_changed(sources: list[SourceFile]) -> None:
    """Raise DataError where a file was written to since it was listed: ranges would be of two versions."""
    for source in sources:
        try:
            facts = Path(source.path).stat()
        except OSError as error:
            raise DataError(f"{source.path} was removed while it was read", hint=_RUN_AGAIN) from error
        if (facts.st_size, facts.st_mtime_ns) != (source.size, source.mtime_ns):
            raise DataError(f"{source.path} was written to while it was read", hint=_RUN_AGAIN)


def _refuse_overlap(sources: list[SourceFile]) -> None:
    """Refuse a file that is in two roles: what is tested on must not be trained on."""
    roles: dict[str, str] = {}
    for source in sources:
        other = roles.setdefault(str(Path(source.path).resolve()), source.role)
        if other != source.role:
            raise InputError(
                f"{source.path} is among the {other} and the {source.role} files",
                hint="splits must not share text: leave it out of one of them",
            )
