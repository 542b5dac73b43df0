"""Save, find and load a run's checkpoints, all ranks together.

A save, in phases that every rank leaves with the same verdict:
1. copy to host memory (training waits for this alone); the rest runs in a thread, over its own process group
2. rank 0 makes a hidden folder
3. every rank writes, fsyncs and hashes its own files
4. rank 0 writes the manifest and renames the folder: now the checkpoint exists
5. every rank reads its own files again and compares
6. rank 0 moves LATEST, then removes what retention no longer wants
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from shoal.checkpoint import commit
from shoal.checkpoint.manifest import (
    STATE,
    Manifest,
    check_file,
    committed,
    describe,
    file_entry,
    read_manifest,
    step_name,
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
from shoal.errors import CheckpointError, ShoalError
from shoal.runtime.failure import is_peer_loss
from shoal.runtime.files import disk_error
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
        self._on_zero("opening the checkpoints folder", commit.remove_leftovers, folder)

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

        A damaged one is named and renamed to bad-step-..., for good. Collective over `group`.
        """
        self.wait()
        while (path := self._on_zero("looking for checkpoints", self._newest)) is not None:
            found = self._agree(f"verifying {path.name}", self._verify_part, path)
            problems = sorted({problem for part in found for problem in part})
            if not problems:
                self._on_zero("moving LATEST", commit.point_latest, path)
                return path
            self._on_zero(f"setting {path.name} aside", _set_aside, path, problems)
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

    def _newest(self) -> Path | None:
        for path in committed(self._folder):
            try:
                if not read_manifest(path).weights_only:
                    return path
            except ShoalError:
                return path  # the verification will name what is wrong
        return None

    def _verify_part(self, path: Path) -> list[str]:
        return verify(path, part=self._rank, parts=self._world_size)

    def _run(self, step: int, tensors: Tensors, sizes: dict[str, int], files: dict[str, bytes]) -> None:
        hidden: Path | None = None
        try:
            hidden = self._on_zero(f"saving step {step}", _make_room, self._folder, step)
            if hidden is not None:
                self._write(hidden, step, tensors, sizes, files)
        except BaseException as error:
            self._error = error
            if self._rank == 0 and hidden is not None:
                shutil.rmtree(hidden, ignore_errors=True)

    def _write(
        self, hidden: Path, step: int, tensors: Tensors, sizes: dict[str, int], files: dict[str, bytes]
    ) -> None:
        """Write, commit, verify, publish. Collective over `group`, in the background."""
        started = time.perf_counter()
        what = f"saving step {step}"
        self._on_zero(what, commit.write_files, hidden, files)
        groups = folders_of(tensors)
        for folder, folder_sizes in folders_of(sizes).items():
            part = groups.get(folder, {})
            self._agree(what, write_folder, hidden / folder, part, folder_sizes, self._group)
        own = [str(path.relative_to(hidden)) for path in _shards(hidden, self._rank)]
        own += sorted(files) if self._rank == 0 else []
        parts = self._agree(what, lambda: {name: file_entry(hidden / name) for name in own})
        entries = {name: entry for some in parts for name, entry in some.items()}
        manifest = Manifest(step, entries, self._world_size)
        path = self._on_zero(what, commit.commit, hidden, manifest)
        found = self._agree(what, lambda: [p for name in own for p in check_file(path, name, entries[name])])
        if problems := [problem for part in found for problem in part]:
            self._on_zero(what, _refuse, path, problems)
        self._on_zero(what, commit.point_latest, path)
        self._on_zero(what, commit.retain, self._folder, **self._retention)
        if self._rank == 0:
            took_s = time.perf_counter() - started
            log.info("checkpoint of step %d: %.1f MB in %.1f s", step, manifest.size_bytes / 1e6, took_s)

    def _on_zero(self, what: str, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """Return what `work` returned on rank 0. Collective over `group`."""
        if self._rank == 0:
            return self._agree(what, work, *args, **named)[0]
        return self._agree(what, lambda: None)[0]  # type: ignore[return-value]

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


def _make_room(folder: Path, step: int) -> Path | None:
    """Return the hidden folder to write into, or None where a good checkpoint of this step is there."""
    present = folder / step_name(step)
    if present.exists():
        problems = verify(present)
        if problems:
            _set_aside(present, problems)
        elif read_manifest(present).weights_only:  # training came back to it: the whole one takes its place
            commit.remove(present)
        else:
            log.info("checkpoint of step %d is there already and good", step)
            return None
    return commit.start_writing(folder, step)


def _set_aside(path: Path, problems: list[str]) -> None:
    target = commit.set_aside(path)
    log.error("checkpoint %s is damaged and set aside as %s: %s", path.name, target.name, describe(problems))


def _shards(hidden: Path, rank: int) -> list[Path]:
    """Return the tensor files that a rank wrote; the storage writer numbers ranks from 1."""
    return sorted(hidden.glob(f"*/shard-{rank + 1:05d}-*.safetensors"))


def _refuse(path: Path, problems: list[str]) -> None:
    _set_aside(path, problems)
    raise CheckpointError(
        f"what was just written reads back damaged: {describe(problems)}", hint="check the disk"
    )


def _refuse_misfit(path: Path, folders: list[str], wanted: dict[str, Any]) -> None:
    refuse_mismatches(path, mismatches(saved_shapes(path, folders), wanted))
