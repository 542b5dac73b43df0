"""Which files hold the text, and the byte ranges into which work on them is cut."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.data.prepare.kinds import NotTextError, find_kind, is_candidate
from shoal.data.prepare.options import PrepareOptions
from shoal.errors import DataError, InputError, counted, nearest

STDLIB = "stdlib"
_NOT_TEXT = {"__pycache__", "node_modules"}  # folders that are passed over, as hidden ones are
_LISTED = 8  # kinds of files that are passed over, at most
_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_RUN_AGAIN = "run the same command again once no program writes to the text; it starts from the beginning"
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


def find_sources(options: PrepareOptions, *, pages: bool = False) -> tuple[list[SourceFile], Counter[str]]:
    """List all input files, each role's in sorted order, and count what folders hold beside them.

    With `pages`, HTML files and web archives are pages to be extracted; without, HTML files are plain text
    where they are named or chosen by suffix. Raises DataError where a role has no text.
    """
    sources: list[SourceFile] = []
    passed_over = Counter[str]()
    for role, inputs in (
        ("main", options.inputs),
        ("validation", options.validation),
        ("test", options.test),
    ):
        search = _Search(role, options, passed_over, pages)
        found = [source for text in inputs for source in search.expand(text)]
        unique = {source.path: source for source in found}
        ordered = [unique[path] for path in sorted(unique)]
        if inputs and not any(source.size for source in ordered):
            raise DataError(
                f"there is no text in {', '.join(inputs)}: {counted(len(ordered), 'file')}, all empty",
                hint="name files or folders with text in them",
            )
        sources += ordered
    _refuse_overlap(sources)
    return sources, passed_over


@dataclass(frozen=True)
class _Search:
    """Looks for the files of one role; counts what it passes over in folders."""

    role: str
    options: PrepareOptions
    passed_over: Counter[str]
    pages: bool

    def expand(self, text: str) -> Iterator[SourceFile]:
        """Turn one INPUT (file, folder, glob or `stdlib`) into files."""
        path = Path(text)
        if text == STDLIB and not path.exists():
            yield from _stdlib(self.role)
        elif path.is_dir():
            yield from self._in_folder(path)
        elif path.is_file():
            yield self._named(path)
        elif path.exists():
            raise InputError(f"{path} is a pipe or device", hint="write the text to a file first")
        elif _GLOB & set(text):
            files = [p for p in map(Path, sorted(glob.glob(text, recursive=True))) if p.is_file()]
            if not files:
                raise DataError(
                    f"no file matches {text}", hint="quote the pattern and check the folder's name"
                )
            yield from map(self._named, files)
        else:
            _refuse_missing(path)

    def _named(self, path: Path) -> SourceFile:
        """Describe a file that is taken because it is named; DataError where it holds no text."""
        return _source(path, self.role, find_kind(path, self.options.text_key, pages=self.pages))

    def _in_folder(self, folder: Path) -> Iterator[SourceFile]:
        """Describe the files of a folder that look like text, and count all others by the reason."""
        taken, passed = 0, Counter[str]()
        for path in self._files_below(folder, passed):
            if not is_candidate(path, self.options.ext, pages=self.pages):
                passed[f"{path.suffix.lower()} file" if path.suffix else "no-suffix file"] += 1
                continue
            try:
                yield self._named(path)
                taken += 1
            except NotTextError as error:
                passed[error.label] += 1
        self.passed_over.update(passed)
        if not taken:
            there = f"; passed over: {in_words(passed)}" if passed else ""
            raise DataError(
                f"folder {folder} holds no text files{there}",
                hint="choose files by suffix (--ext py md), or name them one by one",
            )

    def _files_below(self, folder: Path, passed: Counter[str]) -> Iterator[Path]:
        """Yield the files below a folder; what is hidden, linked, or no file is counted in `passed`."""
        for place, folders, files in os.walk(folder, onerror=_refuse_unreadable):
            for path in [Path(place) / name for name in folders]:
                hidden, output = path.name.startswith("."), path.absolute() == self.options.output.absolute()
                if hidden or output or path.is_symlink() or path.name in _NOT_TEXT:
                    folders.remove(path.name)
                    kind = "hidden" if hidden else "output" if output else path.name
                    passed[f"{'linked' if path.is_symlink() else kind} folder"] += 1
            for path in [Path(place) / name for name in files]:
                if path.name.startswith(".") or not path.is_file():
                    passed["hidden file" if path.name.startswith(".") else "special file"] += 1
                else:
                    yield path


def penn_treebank(options: PrepareOptions) -> PrepareOptions:
    """Take the splits of a folder that holds ptb.train.txt from its files, where they are not given."""
    folder = Path(*options.inputs[:1])
    if len(options.inputs) != 1 or not (folder / "ptb.train.txt").is_file():
        return options
    train, valid, test = (folder / f"ptb.{name}.txt" for name in ("train", "valid", "test"))
    return replace(
        options,
        inputs=(str(train),),
        validation=options.validation or (str(valid),) * valid.is_file(),
        test=options.test or (str(test),) * test.is_file(),
    )


def in_words(counts: Counter[str]) -> str:
    """List what was counted, the most frequent first and the last ones together."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(number for _, number in most[_LISTED:])
    listed = [*most[:_LISTED], *([("other file", rest)] if rest else [])]
    return ", ".join(f"{number:,} {what}{'s' * (number > 1)}" for what, number in listed)


def _refuse_unreadable(error: OSError) -> None:
    raise InputError(
        f"folder {error.filename} cannot be read: {error.strerror}", hint="check its permissions"
    )


def _refuse_missing(path: Path) -> None:
    """Raise an InputError for a path that is not there."""
    if not path.parent.is_dir():
        raise InputError(f"there is no file or folder {path}", hint=f"{path.parent} does not exist either")
    known = [STDLIB, *(p.name for p in path.parent.iterdir() if not p.name.startswith("."))]
    raise InputError(f"there is no file or folder {path}", hint=nearest(path.name, known)[:400])


def _stdlib(role: str) -> Iterator[SourceFile]:
    """List the source files of the running Python's standard library, its tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if not _NOT_CORPUS & set(p.relative_to(root).parts[:-1])]
    if sum(p.stat().st_size for p in files) < 1 << 20:
        raise DataError(
            f"this Python has no standard library source in {root}", hint="name text files of your own"
        )
    yield from (_source(p, role, "text") for p in files)


def _source(path: Path, role: str, kind: str) -> SourceFile:
    """Describe one file."""
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
