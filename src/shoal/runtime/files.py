"""Files that are whole or absent: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from shoal.errors import InputError, ShoalError, UnreadableError

MAX_JSON_BYTES = 64 << 20  # a larger JSON file is not one of ours
_READ_BYTES = 4 << 20


def cache_folder() -> Path:
    """Return the folder of this user for what later commands use; asked for anew, as tests change it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def fsync(path: Path) -> None:
    """Make a file's bytes, or the renames inside a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary neighbour of `path` for bytes; fsync and rename it when the block ends well.

    On an error the temporary file goes and `path` stays as it was. A full disk is a ShoalError that
    names the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path) from error
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except OSError as error:
        raise disk_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden neighbour of `target` to write into; fsync and rename it when the block ends well.

    On an error nothing is left. A `target` that exists is an InputError; a full disk is a ShoalError.
    """
    if target.exists():
        raise InputError(f"{target} exists already", hint="name a new folder")
    hidden = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        for path in sorted(hidden.rglob("*")):
            fsync(path)
        fsync(hidden)
        hidden.rename(target)
        fsync(target.parent)
    except OSError as error:
        raise disk_error(error, target) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make `folder` and hold it for this process until the block or the process ends; refuse any other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise disk_error(error, folder) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            hint = "wait for it, stop it, or choose another folder"
            raise InputError(f"another process is at work in {folder}", hint=hint) from error
        except OSError:  # a file system without locks: nothing is held
            pass
        yield
    finally:
        os.close(handle)


def check_targets(*files: Path | None) -> None:
    """Refuse files that could not be written: before the work, not after it."""
    for file in filter(None, files):
        if file.is_dir():
            raise InputError(f"{file} is a folder", hint="name a file")
        if not file.absolute().parent.is_dir():
            raise InputError(f"{file}: there is no such folder", hint="make it first")


def disk_error(error: OSError, path: Path) -> ShoalError:
    """Turn an operating-system error on `path` into a sentence with what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ShoalError(
            f"the disk is full: cannot write {path}",
            hint="free some space or choose another folder, then run the same command again; nothing is lost",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return InputError(f"{path} cannot be written: {error.strerror}", hint="choose a folder you own")
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT):
        hint = "a file stands where a folder is needed, or a folder where a file is: choose another path"
        return InputError(f"{path} cannot be written: {error.strerror}", hint=hint)
    return ShoalError(f"cannot write {path}: {error.strerror or error}")


def read_error(error: OSError | MemoryError, path: Path) -> UnreadableError:
    """Turn a failure to read `path` into a sentence; what is in the file may be whole.

    Libraries in Rust lose the number of the error, or keep it in their text alone.
    """
    number = getattr(error, "errno", None) or (errno.ENOMEM if isinstance(error, MemoryError) else None)
    if number is None and (found := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(found[1])
    path = Path(getattr(error, "filename", None) or path)
    what = f"{path}, a link to {os.readlink(path)}," if os.path.islink(path) else str(path)
    why = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})" if number else str(error)
    return UnreadableError(
        f"{what} cannot be read: {why}",
        hint="nothing was changed: make it readable (permissions, mounts, limits), then run the same command "
        "again; to go on without it, move it away",
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an UnreadableError where the block cannot read `path`, or what lies below it."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise read_error(error, path) from error


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def digest_of(content: dict[str, Any]) -> str:
    """Return the xxh3-128 digest of plain values, by which a manifest shows that it was not changed."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def append_json(path: Path, value: Any) -> None:
    """Add one line to a JSONL file; a kill may cut the last line short, which readers leave out."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
    except OSError as error:
        raise disk_error(error, path) from error


def read_json(path: Path, what: str) -> Any:
    """Read one JSON file of bounded size; `what` names it in the error ("dataset manifest").

    What is no JSON is an InputError, a file that cannot be read an UnreadableError.
    """
    try:
        with reading(path):
            if path.stat().st_size > MAX_JSON_BYTES:
                raise InputError(
                    f"{what} {path} is larger than {MAX_JSON_BYTES >> 20} MiB: not a file of Shoal's"
                )
            return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} {path} is not valid JSON: {error}") from error


def hash_file(path: Path) -> str:
    """Return the xxh3-128 digest of a file's bytes, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
