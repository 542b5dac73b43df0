"""Save, find and load a run's checkpoints, all ranks together.

A save, in phases that every rank leaves with the same verdict:
1. copy to host memory (training waits for this alone); the rest runs in a thread, over its own process group
2. rank 0 makes a hidden folder
3. every rank writes, fsyncs and hashes its own files
4. rank 0 writes the manifest and renames the folder: now the checkpoint exists
5. every rank reads its own files again and compares
6. rank 0 moves LATEST, then removes what retention no longer wants

Where hosts share no folder, the first rank of each one does what rank 0 does here, for its host's part: it
lists the files of its own host, and names those of the others. A checkpoint exists once all its parts do.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from shoal.checkpoint import commit
from shoal.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Manifest,
    check_file,
    committed,
    describe,
    file_entry,
    missing_parts,
    read_manifest,
    step_name,
    step_of,
    verify,
)
from shoal.checkpoint.tensors import (
    HostCopies,
    Tensors,
    folders_of,
    mismatches,
    read_folder,
    refuse_mismatches,
    saved_shapes,
    share_out,
    sizes_of,
    write_folder,
)
from shoal.checkpoint.transfer import receive_file, send_file
from shoal.errors import CheckpointError, ShoalError, UnreadableError
from shoal.runtime.failure import is_peer_loss
from shoal.runtime.files import disk_error, fsync
from shoal.runtime.log import log

T = TypeVar("T")


class CheckpointStore:
    """The checkpoints folder of one run. Every method that talks to other ranks says so."""

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup,
        keep_last: int = 2,
        keep_every: int = 0,
        keep_every_weights_only: bool = False,
    ) -> None:
        """Open `folder` and remove what a kill left in it. `group` is a gloo group that nothing else uses."""
        self._folder = folder
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._retention = {
            "keep_last": keep_last,
            "keep_every": keep_every,
            "keep_every_weights_only": keep_every_weights_only,
        }
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._in_flight = 0
        self._error: BaseException | None = None
        self._firsts = self._find_firsts()
        self._hosts = self._agree("opening the checkpoints folder", socket.gethostname)
        self._on_first("opening the checkpoints folder", commit.remove_leftovers, folder)

    def save(self, step: int, tensors: Tensors, state: dict[str, Any], files: dict[str, bytes]) -> float:
        """Copy to host memory, start the save, and return the seconds that training was held up.

        `state` (JSON) and `files` (small, such as config.toml) count on rank 0. Waits for a save in flight.
        Raises what made an earlier save fail. Collective over `group`.
        """
        started = time.perf_counter()
        if self._thread is not None and self._thread.is_alive():
            log.info("checkpoint of step %d waits for that of step %d", step, self._in_flight)
        self.wait()
        files = {**files, STATE: json.dumps(state, indent=1).encode()}
        held = self._agree(f"saving step {step}", lambda: sizes_of(tensors))
        mine = share_out(held)[self._rank]
        copies = self._copies.copy({name: tensor for name, tensor in tensors.items() if name in mine})
        sizes = {name: size for part in held for name, (size, _) in part.items()}
        self._in_flight = step
        self._thread = threading.Thread(target=self._run, args=(step, copies, sizes, files), daemon=True)
        self._thread.start()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Wait for the save in flight; raise what made it fail."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    def poll(self) -> None:
        """Raise what made a background save fail; call it every step."""
        if self._error is not None:
            raise self._error

    def latest(self) -> Path | None:
        """Return the newest checkpoint that verifies and can be trained on from; rank 0 decides, all obey.

        A damaged one is named and renamed to bad-step-...; where one cannot be read, nothing is touched and
        all ranks raise. Collective over `group`.
        """
        self.wait()
        while (path := self._newest()) is not None:
            found = self._agree(f"verifying {path.name}", self._verify_part, path)
            problems = sorted({problem for part in found for problem in part})
            if not problems:
                self._on_first("moving LATEST", _point_latest, path)
                return self._bring_together(path)
            self._on_first(f"setting {path.name} aside", _set_aside, path, problems)
        return None

    def load(self, path: Path, tensors: Tensors) -> None:
        """Fill `tensors` in place from a checkpoint saved under any layout. Collective over `group`.

        Each folder that is named (`model`, `optimizer`) must hold just these tensors, over all ranks.
        """
        self.wait()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        wanted: dict[str, Any] = {}
        for part in self._agree("loading", lambda: shapes):
            wanted |= part
        folders = sorted({name.partition(".")[0] for name in wanted})
        self._agree("loading", _refuse_misfit, path, folders, wanted)
        groups = folders_of(tensors)
        for folder in folders:
            self._agree("loading", read_folder, path / folder, groups.get(folder, {}), self._group)
        self._on_first("loading", commit.end_whole, path)

    @property
    def _is_first(self) -> bool:
        return self._firsts[self._rank] == self._rank

    def _find_firsts(self) -> list[int]:
        """Return for each rank the first one that works in the same folder: 0 for all where hosts share it.

        Each rank leaves a file with a name that nobody else knows; which of these a rank sees tells.
        Collective over `group`.
        """
        what = "opening the checkpoints folder"
        if self._world_size == 1:
            return [0]
        name = f".nonce-{self._agree(what, secrets.token_hex, 8)[0]}-"
        own = self._folder / f"{name}{self._rank}"
        try:
            self._agree(what, _leave, own)
            ranks = range(self._world_size)
            return self._agree(
                what, lambda: next(rank for rank in ranks if (self._folder / f"{name}{rank}").exists())
            )
        finally:
            with contextlib.suppress(OSError):
                own.unlink()

    def _newest(self) -> Path | None:
        """Return the newest checkpoint to go on from whose parts are all there. Collective over `group`."""
        told = self._agree("looking for checkpoints", _manifests, self._folder if self._is_first else None)
        steps = sorted({step for part in told for step in part}, reverse=True)
        incomplete: dict[int, list[str]] = {}
        for step in steps:
            parts = [part[step] for part in told if step in part]
            # One that cannot be read is for the verification to name.
            missing = [] if None in parts else missing_parts([part for part in parts if part])
            if not missing:
                self._on_first("setting incomplete checkpoints aside", self._set_incomplete_aside, incomplete)
                return self._folder / step_name(step)
            incomplete[step] = missing
        if incomplete:
            raise CheckpointError(
                f"no checkpoint in {self._folder} is complete; of {step_name(steps[0])}, "
                f"{'; '.join(incomplete[steps[0]])}",
                hint="bring that host or its folder back, or see `shoal checkpoint gather --help`",
            )
        return None

    def _set_incomplete_aside(self, incomplete: dict[int, list[str]]) -> None:
        for step, missing in incomplete.items():
            _set_aside(self._folder / step_name(step), [f"it is not complete: {part}" for part in missing])

    def _verify_part(self, path: Path) -> list[str]:
        mates = [rank for rank, first in enumerate(self._firsts) if first == self._firsts[self._rank]]
        if any(self._firsts) and not os.path.lexists(path):
            return []  # other hosts have it
        return verify(path, part=mates.index(self._rank), parts=len(mates))

    def _bring_together(self, path: Path) -> Path:
        """Return `path`, or a whole copy for hosts that keep only a part of it. Collective over `group`."""
        what = f"bringing the parts of {path.name} together"
        told = self._agree(what, _read_part, path if self._is_first else None)
        parts = {rank: part.files if part else {} for rank, part in enumerate(told) if rank in self._firsts}
        files = {name: entry for held in parts.values() for name, entry in held.items()}
        if all(held.keys() == files.keys() for held in parts.values()):
            return path
        log.info("each host has a part of %s: they send each other what is missing", path.name)
        whole = self._on_first(what, commit.begin_whole, path)
        for name, entry in sorted(files.items()):
            owner = next(rank for rank, held in parts.items() if name in held)
            takers = [rank for rank, held in parts.items() if name not in held]
            self._agree(what, self._hand_over, name, entry, owner, takers, path, whole)
        manifest = replace(next(part for part in told if part), files=files, elsewhere={})
        self._on_first(what, commit.write_files, whole, {MANIFEST: manifest.to_json().encode()})
        return whole

    def _hand_over(
        self, name: str, entry: dict[str, Any], owner: int, takers: list[int], path: Path, whole: Path
    ) -> None:
        """Send one file from its owner's checkpoint to the takers' whole copies of it."""
        if self._rank == owner:
            send_file(path / name, takers, self._group)
        elif self._rank in takers:
            receive_file(whole / name, entry["size_bytes"], owner, self._group)
            if problems := check_file(whole, name, entry):
                raise CheckpointError(f"it arrived damaged: {describe(problems)}")

    def _run(self, step: int, tensors: Tensors, sizes: dict[str, int], files: dict[str, bytes]) -> None:
        hidden: Path | None = None
        what = f"saving step {step}"
        try:
            if all(self._agree(what, lambda: not self._is_first or _is_there(self._folder, step))):
                log.info("checkpoint of step %d is there already and good", step)
                return
            hidden = self._on_first(what, _make_room, self._folder, step)
            self._write(hidden, step, tensors, sizes, files)
        except BaseException as error:
            self._error = error
            if self._is_first and hidden is not None:
                shutil.rmtree(hidden, ignore_errors=True)

    def _write(
        self, hidden: Path, step: int, tensors: Tensors, sizes: dict[str, int], files: dict[str, bytes]
    ) -> None:
        """Write, commit, verify, publish. Collective over `group`, in the background."""
        started = time.perf_counter()
        what = f"saving step {step}"
        if any(self._firsts):
            files = self._agree(what, lambda: files if self._rank == 0 else {})[0]
        self._on_first(what, commit.write_files, hidden, files)
        groups = folders_of(tensors)
        for folder, folder_sizes in folders_of(sizes).items():
            part = groups.get(folder, {})
            self._agree(what, write_folder, hidden / folder, part, folder_sizes, self._group)
        own = [str(path.relative_to(hidden)) for path in _shards(hidden, self._rank)]
        own += sorted(files) if self._is_first else []
        parts = self._agree(what, lambda: {name: _entry_on_disk(hidden / name) for name in own})
        manifest = self._manifest(step, parts)
        path = self._on_first(what, commit.commit, hidden, manifest)
        found = self._agree(what, self._read_back, path, manifest, own)
        if problems := [problem for part in found for problem in part]:
            self._on_first(what, _refuse, path, problems)
        self._on_first(what, commit.point_latest, path)
        self._on_first(what, commit.retain, self._folder, **self._retention)
        if self._rank == 0:
            took_s = time.perf_counter() - started
            log.info("checkpoint of step %d: %.1f MB in %.1f s", step, manifest.size_bytes / 1e6, took_s)

    def _read_back(self, path: Path, manifest: Manifest, own: list[str]) -> list[str]:
        """Return what is wrong with this rank's files; the first one reads the manifest, too."""
        problems = [problem for name in own for problem in check_file(path, name, manifest.files[name])]
        try:
            if self._is_first:
                read_manifest(path)
        except CheckpointError as error:
            problems.append(error.message)
        return problems

    def _manifest(self, step: int, parts: list[dict[str, Any]]) -> Manifest:
        """List what each rank wrote: the files in this rank's folder, and those that other hosts keep."""
        first = self._firsts[self._rank]
        here: dict[str, Any] = {}
        elsewhere: dict[str, dict[str, Any]] = {}
        for rank, files in enumerate(parts):
            host = self._hosts[self._firsts[rank]]
            (here if self._firsts[rank] == first else elsewhere.setdefault(host, {})).update(files)
        for files in elsewhere.values():  # each host has state.json and the other small files
            for name in here.keys() & files.keys():
                del files[name]
        return Manifest(step, here, self._world_size, elsewhere=elsewhere)

    def _on_first(self, what: str, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """Return what `work` gave on the first rank that has this rank's folder. Collective over `group`."""
        if self._is_first:
            return self._agree(what, work, *args, **named)[self._rank]
        return self._agree(what, lambda: None)[self._firsts[self._rank]]  # type: ignore[return-value]

    def _agree(self, what: str, work: Callable[..., T], *args: Any, **named: Any) -> list[T]:
        """Return every rank's result, or raise the first rank's failure on all. Collective over `group`.

        The loss of a peer is not agreed on but raised as it is: a restart mends it.
        """
        outcome: Any
        try:
            outcome = (work(*args, **named), None)
        except Exception as error:
            if is_peer_loss(error):
                raise
            outcome = (None, _sentence(error, self._folder))
        everyone: list[Any] = [None] * self._world_size
        dist.all_gather_object(everyone, outcome, group=self._group)
        for rank, (_, failure) in enumerate(everyone):
            if failure is not None:
                where = f" on rank {rank}" if self._world_size > 1 else ""
                raise CheckpointError(f"{what} failed{where}: {failure[0]}", hint=failure[1])
        return [result for result, _ in everyone]


def _sentence(error: Exception, folder: Path) -> tuple[str, str]:
    if isinstance(error, OSError):
        error = disk_error(error, Path(error.filename or folder))
    if isinstance(error, ShoalError):
        return error.message, error.hint
    return f"{type(error).__name__}: {error}", ""


def _is_there(folder: Path, step: int) -> bool:
    """Say whether a good checkpoint of this step is there; a damaged one is set aside.

    So is a link that leads nowhere. What else cannot be read is an UnreadableError.
    """
    present = folder / step_name(step)
    if not os.path.lexists(present):
        return False
    try:
        problems = verify(present)
    except UnreadableError as error:
        number = getattr(error.__cause__, "errno", None)
        if not present.is_symlink() or number not in (errno.ENOENT, errno.ELOOP):
            raise
        problems = [error.message]
    if problems:
        _set_aside(present, problems)
        return False
    return not read_manifest(present).weights_only


def _make_room(folder: Path, step: int) -> Path:
    """Return the hidden folder to write into; what is there of this step, and not enough, goes."""
    present = folder / step_name(step)
    if os.path.lexists(present):  # weights alone, or a part whose others are lost
        commit.remove(present)
    return commit.start_writing(folder, step)


def _leave(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def _read_part(path: Path | None) -> Manifest | None:
    return read_manifest(path) if path is not None and path.exists() else None


def _manifests(folder: Path | None) -> dict[int, Manifest | None]:
    """Return step -> manifest of each checkpoint to train on; None for a manifest that cannot be read."""
    found: dict[int, Manifest | None] = {}
    for path in committed(folder) if folder else ():
        step = step_of(path)
        assert step is not None, path
        try:
            manifest = read_manifest(path)
            if not manifest.weights_only:
                found[step] = manifest
        except ShoalError:
            found[step] = None
    return found


def _point_latest(path: Path) -> None:
    if path.exists():  # not on a host that has no part of it
        commit.point_latest(path)


def _set_aside(path: Path, problems: list[str]) -> None:
    if not os.path.lexists(path):  # on this host
        return
    target = commit.set_aside(path)
    log.error("checkpoint %s is damaged and set aside as %s: %s", path.name, target.name, describe(problems))


def _shards(hidden: Path, rank: int) -> list[Path]:
    """Return the tensor files that a rank wrote; the storage writer numbers ranks from 1."""
    return sorted(hidden.glob(f"*/shard-{rank + 1:05d}-*.safetensors"))


def _entry_on_disk(path: Path) -> dict[str, Any]:
    """Return a file's entry for the manifest once its bytes are on disk."""
    fsync(path)  # torch's writer does so while the last bytes, or all of a small file, are in its buffer
    return file_entry(path)


def _refuse(path: Path, problems: list[str]) -> None:
    _set_aside(path, problems)
    raise CheckpointError(
        f"what was just written reads back damaged: {describe(problems)}", hint="check the disk"
    )


def _refuse_misfit(path: Path, folders: list[str], wanted: dict[str, Any]) -> None:
    refuse_mismatches(path, mismatches(saved_shapes(path, folders), wanted))
