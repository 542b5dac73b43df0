"""A run's folder while it is in use: what stands in the way of its files, and errors about them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, ShoalError
from shoal.runtime.files import alone_in, disk_error
from shoal.runtime.log import log

_FOLDERS = ("ranks", "compiled", "profile", "tensorboard", "postmortem", "replicas")
_MARKERS = ("ranks/stop-requested", "ranks/stopped")
_FILES = ("config.toml", "plan.json", "metrics.jsonl", "incidents.jsonl", "loss.png", "sinks-name", *_MARKERS)
_FILES_OF_RANK = ("log", "pid", "flight-recorder", "stack", "error.json")
_LASTING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
)


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder for this process, as `alone_in`, with nothing in the way of what a run writes."""
    with alone_in(run_dir), in_sentences(run_dir):
        clear_folder(run_dir)
        yield


def in_folder(run_dir: Path, work: Callable[[], int]) -> int:
    """Do a run's work while its folder is held; return its exit status.

    A new folder of a run that is refused before its first step goes again.
    """
    is_new, status = not os.path.lexists(run_dir), EXIT_DONE
    with held(run_dir):
        try:
            status = work()
        except InputError:
            status = EXIT_BAD_INPUT
            raise
        finally:
            if is_new and status == EXIT_BAD_INPUT and not (run_dir / "metrics.jsonl").exists():
                shutil.rmtree(run_dir, ignore_errors=True)
    return status


@contextmanager
def in_sentences(run_dir: Path, *, lasting: bool = False) -> Iterator[None]:
    """Turn what the system says about a path in `run_dir` into a sentence; other errors stay as they are.

    With `lasting`, so do those that may pass, and that a restart may mend.
    """
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
        if path is None or not path.is_relative_to(run_dir) or (lasting and error.errno not in _LASTING):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_error(error, path) from error
        kind = InputError if error.errno in _LASTING else ShoalError
        hint = "a run reads and writes there: see its permissions, and what stands in its place"
        raise kind(f"{path} cannot be used: {error.strerror or error}", hint=hint) from error


def clear_folder(run_dir: Path) -> None:
    """Set aside all that stands in the way of a run's files. Call it before the run writes any of them."""
    for name in _FOLDERS:
        clear_way(run_dir / name, folder=True)
    for name in _FILES:
        clear_way(run_dir / name)
    for rank in run_dir.glob("ranks/rank-*[0-9]"):
        clear_way(rank, folder=True)
        for name in _FILES_OF_RANK:
            clear_way(rank / name)


def clear_way(path: Path, *, folder: bool = False) -> None:
    """Rename to NAME.bad what stands where a run writes a file, or needs a `folder`, and is none.

    A link counts as what it leads to; one that leads nowhere is set aside, too.
    """
    if not os.path.lexists(path) or (path.is_dir() if folder else path.is_file()):
        return
    names = (f"{path.name}.bad", *(f"{path.name}.{number}.bad" for number in range(2, 1000)))
    target = next(aside for name in names if not os.path.lexists(aside := path.with_name(name)))
    path.rename(target)
    what = "folder" if folder else "file"
    log.warning("warning: %s is not a %s: moved to %s", path, what, target.name)
