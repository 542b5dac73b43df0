"""`shoal checkpoint ls | verify | rm | gather`: what a run has saved, is it whole, what may go. No torch."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.checkpoint import commit
from shoal.checkpoint.manifest import (
    MANIFEST,
    check_file,
    committed,
    describe,
    read_manifest,
    read_state,
    step_name,
    step_of,
    verify,
)
from shoal.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, InputError, ShoalError, UnreadableError
from shoal.runtime.files import alone_in, reading, write_json, write_text

_SET_ASIDE = re.compile(r"bad-step-\d{8,12}(-\d+)?")


def list_checkpoints(path: Path, json_file: Path | None = None) -> int:
    """Print one line a checkpoint, verified, newest first; damaged ones that were set aside come last."""
    checkpoints, aside = _find(path)
    rows = [_row(checkpoint) for checkpoint in checkpoints]
    set_aside = [checkpoint.name for checkpoint in aside]
    table = Table(box=None)
    for heading in ("checkpoint", "size", "saved (UTC)", "loss", "holds"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("size", "loss") else "left")
    table.add_column("state", overflow="fold")
    for row in rows:
        size = "" if row["size_bytes"] is None else f"{row['size_bytes'] / 1e6:,.1f} MB"
        loss = f"{row['loss']:.4f}" if isinstance(row["loss"], int | float) else ""
        state = describe(row["problems"]) or "good"
        table.add_row(row["name"], size, row["created"][:16].replace("T", " "), loss, row["holds"], state)
    for name in set_aside:
        table.add_row(name, "", "", "", "", "damaged, set aside")
    Console(markup=False).print(table)  # a name from a stranger is text
    if json_file is not None:
        write_json(json_file, {"checkpoints": rows, "set_aside": set_aside})
    return EXIT_DONE


def verify_checkpoints(path: Path) -> int:
    """Read every file again, print a line a checkpoint, and return 1 where one in use is not good.

    What was set aside and is whole is taken back into use; 1 also where nothing is in use.
    """
    checkpoints, aside = _find(path)
    good = []
    for checkpoint in checkpoints:
        problems = _problems(checkpoint)
        good.append(not problems)
        print(f"{checkpoint.name}: {'; '.join(problems) or 'good'}")
    for checkpoint in aside:
        taken, told = _take_back(checkpoint)
        good += [True] * taken
        print(f"{checkpoint.name}: {told}")
    return EXIT_DONE if good and all(good) else EXIT_FAILED


def _take_back(aside: Path) -> tuple[bool, str]:
    """Give what was set aside its name again where it is whole; return whether, and the sentence to tell."""
    if problems := _problems(aside):
        return False, f"set aside: {'; '.join(problems)}"
    step = read_manifest(aside).step
    if not aside.name.startswith(f"bad-{step_name(step)}"):
        return False, f"set aside: its manifest says step {step}"
    if os.path.lexists(aside.with_name(step_name(step))):
        return False, f"good, but not restored: {step_name(step)} exists, too; remove one of them"
    try:
        with alone_in(aside.parents[aside.parent.name == "checkpoints"]):
            target = commit.take_back(aside, step)
            _point_latest_again(target.parent)
    except InputError as error:  # a run is at work here
        return False, f"good, but not restored: {error.message}"
    return True, f"good, and in use again as {target.name}"


def _problems(checkpoint: Path) -> list[str]:
    """Return what is wrong with a checkpoint, or why it cannot be read."""
    try:
        return verify(checkpoint)
    except UnreadableError as error:
        return [error.message]


def _newest_good(folder: Path) -> Path | None:
    return next((checkpoint for checkpoint in committed(folder) if not _problems(checkpoint)), None)


def _point_latest_again(folder: Path) -> None:
    """Make LATEST name the newest good checkpoint after a change."""
    if newest := _newest_good(folder):
        commit.point_latest(newest)
    else:
        with contextlib.suppress(OSError):
            (folder / commit.LATEST).unlink()


def remove_checkpoint(path: Path, force: bool = False) -> int:
    """Remove one checkpoint folder, good or set aside; the newest good one only with `force`."""
    path = _absolute(path)  # a link goes, not what it leads to
    if not os.path.lexists(path) or (step_of(path) is None and not _SET_ASIDE.fullmatch(path.name)):
        raise InputError(
            f"{path} is not a checkpoint folder", hint="give one like runs/NAME/checkpoints/step-00000600"
        )
    if path == _newest_good(path.parent) and not force:
        raise InputError(
            f"{path} is the newest good checkpoint: the run would lose the steps since an older one",
            hint="use --force to remove it anyway",
        )
    commit.remove(path)
    _point_latest_again(path.parent)
    print(f"removed {path}")
    return EXIT_DONE


def gather_parts(path: Path, folders: tuple[Path, ...]) -> int:
    """Bring together one checkpoint whose parts were kept by hosts without a shared folder.

    `path` has one part and becomes whole; `folders` hold copies of the others: runs, or what lies in them.
    """
    checkpoint = next(iter(_find(path)[0]), path)
    if problems := verify(checkpoint):
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: {describe(problems)}")
    manifest = read_manifest(checkpoint)
    wanted = {name: entry for files in manifest.elsewhere.values() for name, entry in files.items()}
    sources = [found for folder in folders for found in _find(folder)[0]]
    for name, entry in wanted.items():
        if not check_file(checkpoint, name, entry):
            continue  # brought by an earlier, interrupted call
        source = next((found for found in sources if not check_file(found, name, entry)), None)
        if source is None:
            host = next(host for host, files in manifest.elsewhere.items() if name in files)
            raise CheckpointError(
                f"{name} of {checkpoint.name}, which host {host} kept, is in none of the given folders, "
                "or damaged there",
                hint=f"copy that host's {checkpoint.name} here and name its folder",
            )
        commit.adopt(checkpoint, name, source / name)
    whole = replace(manifest, files=manifest.files | wanted, elsewhere={})
    write_text(checkpoint / MANIFEST, whole.to_json())
    print(f"{checkpoint}: complete, with the files of {', '.join(manifest.elsewhere)}")
    return EXIT_DONE


def _find(path: Path) -> tuple[list[Path], list[Path]]:
    """Return checkpoints, and those set aside; `path` may be a run, its checkpoints folder or one of them."""
    with reading(path):
        given, path = path, _absolute(path)
        if _SET_ASIDE.fullmatch(path.name):
            return [], [path]
        if not path.is_dir() and step_of(path) is None:
            raise InputError(f"{given} is not a folder", hint="give a run folder or a checkpoint folder")
        if step_of(path) is not None or (path / MANIFEST).exists():
            return [path], []
        folder = path / "checkpoints" if (path / "checkpoints").exists() else path
        found, names = committed(folder), os.listdir(folder)
    aside = [folder / name for name in sorted(names) if _SET_ASIDE.fullmatch(name)]
    if not found + aside:
        raise InputError(f"{folder} holds no checkpoint", hint="checkpoints are folders named step-NNNNNNNN")
    return found, aside


def _absolute(path: Path) -> Path:
    """Return `path` with its folder's real name; a link in its last place stays one."""
    return path.resolve() if path.name == ".." else path.parent.resolve() / path.name


def _row(checkpoint: Path) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": checkpoint.name,
        "step": step_of(checkpoint),
        "size_bytes": None,
        "created": "",
        "loss": None,
        "holds": "",
        "problems": _problems(checkpoint),
    }
    try:
        manifest = read_manifest(checkpoint)
        row |= {"size_bytes": manifest.size_bytes, "created": manifest.created}
        row["holds"] = "weights" if manifest.weights_only else "all"
        if manifest.elsewhere:
            row["holds"] += f", but for what is on {', '.join(manifest.elsewhere)}"
        row["loss"] = read_state(checkpoint).get("loss")
    except ShoalError:
        pass  # `problems` says it
    return row
