"""The moves that make a checkpoint exist, or go, at one instant: rename, then fsync of the folder.

Every function here runs on one rank for each folder: rank 0 where all hosts share it. What lies under a name
with a leading dot does not exist for readers and goes at the next start.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

from shoal.checkpoint.manifest import (
    MANIFEST,
    WEIGHTS,
    Manifest,
    committed,
    is_file_name,
    read_manifest,
    step_name,
    step_of,
)
from shoal.errors import InputError, ShoalError
from shoal.runtime.files import fsync, write_text
from shoal.runtime.log import log
from shoal.runtime.run_folder import clear_way

LATEST = "LATEST"
# Names that are given below, in store.py, and by atomic_write; any other hidden file is not ours.
_LEFTOVER = re.compile(
    r"\.(step-\d{8,12}\.(tmp|rm)-[0-9a-f]{8}|(whole|gather)-[0-9a-f]{8}|nonce-[0-9a-f]{16}-\d+"
    rf"|({LATEST}|{re.escape(MANIFEST)})\.\d+\.tmp)"
)


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill left behind: half-written saves, half-done removals, half-done thinning."""
    checkpoints = committed(folder)  # or says why they cannot be listed
    for path in (*folder.glob(".*"), *folder.glob(f"step-*/.{MANIFEST}.*.tmp")):
        if _LEFTOVER.fullmatch(path.name):
            discard(path)
    for checkpoint in checkpoints:
        thin_out_files(checkpoint)


def discard(path: Path) -> None:
    """Remove a file, folder or link, and nothing that a link leads to; what resists is named and stays."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("warning: leftover %s could not be removed, and stays: %s", path, error.strerror or error)


def start_writing(folder: Path, step: int) -> Path:
    """Make the hidden folder that a save writes into."""
    folder.mkdir(parents=True, exist_ok=True)
    fsync(folder.parent)  # of a new run, that folder too must outlast a power cut
    hidden = folder / f".{step_name(step)}.tmp-{secrets.token_hex(4)}"
    hidden.mkdir()
    return hidden


def begin_whole(part: Path) -> Path:
    """Make a hidden whole copy of a checkpoint, which begins with hard links to this host's part, if any."""
    whole = part.parent / f".whole-{secrets.token_hex(4)}" / part.name
    whole.mkdir(parents=True)
    for name in read_manifest(part).files if part.exists() else ():
        (whole / name).parent.mkdir(exist_ok=True)
        try:
            os.link(part / name, whole / name)
        except OSError:  # behind a link to another disk, say
            shutil.copyfile(part / name, whole / name)
    return whole


def adopt(checkpoint: Path, name: str, source: Path) -> None:
    """Copy one file of another host into a checkpoint; it counts once the manifest lists it."""
    copy = checkpoint.parent / f".gather-{secrets.token_hex(4)}"
    with source.open("rb") as theirs, copy.open("xb") as ours:
        shutil.copyfileobj(theirs, ours, 4 << 20)
        ours.flush()
        os.fsync(ours.fileno())
    (checkpoint / name).parent.mkdir(exist_ok=True)
    copy.rename(checkpoint / name)
    fsync((checkpoint / name).parent)


def end_whole(checkpoint: Path) -> None:
    """Remove what `begin_whole` made; any other checkpoint stays."""
    if checkpoint.parent.name.startswith(".whole-"):
        discard(checkpoint.parent)


def write_files(hidden: Path, files: dict[str, bytes]) -> None:
    """Write the small files of a checkpoint to the disk itself."""
    for name, content in files.items():
        assert is_file_name(name), name
        assert "/" not in name, name
        with (hidden / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def commit(hidden: Path, manifest: Manifest) -> Path:
    """Write the manifest, then give the folder its visible name; return that path.

    All files in it must be on disk already.
    """
    target = hidden.parent / step_name(manifest.step)
    write_files(hidden, {MANIFEST: manifest.to_json().encode()})
    for folder in (*(path for path in hidden.iterdir() if path.is_dir()), hidden):
        fsync(folder)
    hidden.rename(target)  # fails where a step of that name exists; an empty folder is no checkpoint
    fsync(hidden.parent)
    return target


def point_latest(checkpoint: Path) -> None:
    """Move LATEST to a checkpoint that was verified."""
    latest = checkpoint.parent / LATEST
    text = f"{step_of(checkpoint)}\n"
    clear_way(latest)
    with contextlib.suppress(OSError):  # it is replaced, then
        if latest.read_text(encoding="utf-8", errors="replace") == text:
            return
    write_text(latest, text)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint so that it is not chosen again; return its new path."""
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        target = checkpoint.with_name(f"bad-{checkpoint.name}{suffix}")
        if not os.path.lexists(target):
            checkpoint.rename(target)
            fsync(checkpoint.parent)
            return target
    raise InputError(f"{checkpoint.parent} holds a thousand damaged copies of {checkpoint.name}")


def take_back(aside: Path, step: int) -> Path:
    """Give what was set aside its name again; return its new path. No step of that name may be there."""
    target = aside.with_name(step_name(step))
    aside.rename(target)
    fsync(target.parent)
    return target


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; a kill in the middle leaves a hidden folder, never half a checkpoint.

    Of a link only the link goes: the folder that it leads to is the user's.
    """
    if checkpoint.is_symlink():
        log.info("%s was a link: the folder it leads to stays: %s", checkpoint.name, os.readlink(checkpoint))
    hidden = checkpoint.with_name(f".{checkpoint.name}.rm-{secrets.token_hex(4)}")
    checkpoint.rename(hidden)
    fsync(checkpoint.parent)
    discard(hidden)


def keep_weights_only(checkpoint: Path) -> None:
    """Drop everything but the weights and the small files: first from the manifest, then from the disk.

    What a link leads to stays whole.
    """
    manifest = read_manifest(checkpoint)
    if manifest.weights_only or checkpoint.is_symlink():
        return
    kept = {
        name: entry
        for name, entry in manifest.files.items()
        if name.split("/")[0] == WEIGHTS or "/" not in name
    }
    apart = {
        host: {name: entry for name, entry in files.items() if name.split("/")[0] == WEIGHTS}
        for host, files in manifest.elsewhere.items()
    }
    thinned = replace(manifest, files=kept, weights_only=True, elsewhere=apart)
    write_text(checkpoint / MANIFEST, thinned.to_json())
    thin_out_files(checkpoint)


def thin_out_files(checkpoint: Path) -> None:
    """Remove the folders that a weights-only manifest no longer lists."""
    try:
        weights_only = read_manifest(checkpoint).weights_only
    except ShoalError:
        return  # damaged: for the verification to name, not for us to touch
    if weights_only and not checkpoint.is_symlink():
        for path in checkpoint.glob("*/"):
            if path.name != WEIGHTS:
                discard(path)


def retain(folder: Path, *, keep_last: int, keep_every: int, keep_every_weights_only: bool) -> None:
    """Remove or thin out what is neither among the newest `keep_last` nor a multiple of `keep_every`.

    Call it only after the newest checkpoint was verified. What cannot be removed is named and tried again.
    A plain file with a step's name is not ours.
    """
    checkpoints = [path for path in committed(folder) if path.is_symlink() or os.path.isdir(path)]
    for checkpoint in checkpoints[keep_last:]:
        step = step_of(checkpoint) or 0
        try:
            if not keep_every or step % keep_every:
                remove(checkpoint)
            elif keep_every_weights_only:
                keep_weights_only(checkpoint)
        except (OSError, ShoalError) as error:
            log.warning("old checkpoint %s could not be removed: %s", checkpoint.name, error)
