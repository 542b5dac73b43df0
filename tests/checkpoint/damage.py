"""Ways in which a disk, a person or a stranger changes a checkpoint."""

from __future__ import annotations

import ctypes
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.checkpoint.manifest import MANIFEST, Manifest, file_entry, read_manifest


def files_of(checkpoint: Path) -> list[Path]:
    """Return all files of a checkpoint, the manifest too."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def flip_bit(path: Path, position: int) -> None:
    """Turn one bit of a file around."""
    content = bytearray(path.read_bytes())
    content[position // 8 % len(content)] ^= 1 << position % 8
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    """Drop a file's second half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def forge_manifest(checkpoint: Path, **changes) -> None:
    """Write a manifest whose digests fit whatever files are there, as a stranger would."""
    names = [str(path.relative_to(checkpoint)) for path in files_of(checkpoint) if path.name != MANIFEST]
    files = {name: file_entry(checkpoint / name) for name in names}
    step = int(checkpoint.name.removeprefix("step-"))
    manifest = Manifest(**{"step": step, "files": files, **changes})
    (checkpoint / MANIFEST).write_text(manifest.to_json())


def edit_manifest(checkpoint: Path, **changes) -> None:
    """Change entries of the manifest and leave its digest as it was."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps({**content, **changes}))


def entries(checkpoint: Path) -> dict:
    """Return the manifest's list of files."""
    return read_manifest(checkpoint).files


@contextmanager
def permissions_count() -> Iterator[None]:
    """Let this thread, and those it starts, meet the permissions of files, though root's it be."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    before = sets[0]
    sets[0] &= ~0b110  # of the effective ones CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0] = before
        libc.capset(header, sets)


@contextmanager
def no_file_left_to_open() -> Iterator[None]:
    """Use up the files that this process may have open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, limits[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for handle in taken:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
