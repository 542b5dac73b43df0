"""Faults of the files in a run folder, and what a start makes of them."""

from __future__ import annotations

import logging
import os
import random
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

from shoal.checkpoint.manifest import committed, verify
from shoal.errors import ShoalError
from shoal.runtime.log import log
from shoal.runtime.run_folder import held
from tests.checkpoint.damage import cut_short, flip_bit, permissions_count
from tests.train.ranks import run_training

_OLDER, _NEWER = "step-00000002", "step-00000004"


def _replaced(path: Path, put: Callable[[], Any]) -> None:
    path.unlink()
    put()


FAULTS: dict[str, Callable[[Path], Any]] = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": cut_short,
    "flipped": lambda path: flip_bit(path, random.Random(path.name).randrange(8 * path.stat().st_size)),
    "random": lambda path: path.write_bytes(random.Random(path.name).randbytes(path.stat().st_size)),
    "folder": lambda path: _replaced(path, path.mkdir),
    "dangling": lambda path: _replaced(path, lambda: path.symlink_to("nowhere")),
    "itself": lambda path: _replaced(path, lambda: path.symlink_to(path.name)),
    "other": lambda path: _replaced(path, lambda: path.symlink_to(os.devnull)),
    "unreadable": lambda path: path.chmod(0),
}


def cases(run: Path) -> list[tuple[str, str]]:
    """Return each file of a run folder with each fault; of the older checkpoint with one of each kind."""
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return [
        (name, fault) for name in names for fault in (("flipped", "unreadable") if _OLDER in name else FAULTS)
    ]


def disturb(run: Path, name: str, fault: str) -> bool:
    """Put a fault in the place of one file; say whether it changes what is there."""
    path = run / name
    if not path.stat().st_size and fault in ("flipped", "random", "truncated"):
        return False
    FAULTS[fault](path)
    return fault != "unreadable"


def check_case(pristine: Path, run: Path, name: str, fault: str, start: Callable[[Path], str]) -> str:
    """Disturb a copy of a run and start it; return what is wrong with how that went, or nothing.

    `start` returns an empty text where training went on to its end, and else what was said.
    """
    shutil.copytree(pristine, run)
    damaged = name if disturb(run, name, fault) else ""
    before = _kept(run)
    said = start(run)
    if "Traceback" in said:
        return said
    if said and str(run / name) not in said:
        return f"it does not name the file: {said}"
    if said:
        if (kept := _kept(run)) != before:
            return f"it stopped and left {sorted(kept)}"
        _undo(pristine, run, name)
        if again := start(run):
            return f"the fault is undone and it does not go on: {again}"
    elif wrong := _wrong_after(run, before, damaged):
        return wrong
    shutil.rmtree(run)
    return ""


def _kept(run: Path) -> dict[str, tuple[int, int]]:
    """Return which file lies under each name in the checkpoints, those set aside included."""
    found = {str(path.relative_to(run)): path.lstat() for path in run.glob("checkpoints/*step-*/**/*")}
    return {name: (file.st_ino, file.st_mtime_ns) for name, file in found.items() if S_ISREG(file.st_mode)}


def _wrong_after(run: Path, before: dict[str, tuple[int, int]], damaged: str) -> str:
    """Return what is wrong where training went on: what was good must be there, and nothing else set aside.

    The older checkpoint goes once there are two newer ones.
    """
    if [path.name for path in committed(run / "checkpoints")] != ["step-00000006", _NEWER]:
        return "it ended without its last step, or the one before"
    if any(verify(path) for path in committed(run / "checkpoints")):
        return "a checkpoint in use is not good"
    aside = [path.name for path in run.glob("checkpoints/bad-*")]
    if aside != [f"bad-{_NEWER}"] * (_NEWER in damaged):
        return f"it set {aside} aside"
    after = _kept(run)
    changed = [name for name in before if _NEWER in name and after.get(name) != before[name]]
    if changed and _NEWER not in damaged:
        return f"it has made {changed} anew"
    return ""


def _undo(pristine: Path, run: Path, name: str) -> None:
    path = run / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(pristine / name, path)


def run_cases(base: Path, values: dict[str, Any], shift: int, stride: int) -> list[str]:
    """Start a run with each `stride`-th fault, in this process; return what went wrong, a text each."""
    pristine, halted = base / "pristine", {**values, "runtime": {**values["runtime"], "stop_after": 4}}
    expected = run_training(base / "whole", values)["weights"]
    with held(pristine):
        run_training(pristine, halted)

    def start(run: Path) -> str:
        try:
            with permissions_count(), held(run):
                result = run_training(run, values)
        except ShoalError as error:
            return str(error)
        except Exception:
            return traceback.format_exc()
        same = all(np.array_equal(result["weights"][name], weight) for name, weight in expected.items())
        return "" if same and result["done"] else "Traceback: other weights"

    log.setLevel(logging.CRITICAL)
    told = []
    for number, (name, fault) in enumerate(cases(pristine)[shift::stride]):
        if wrong := check_case(pristine, base / f"run-{number}", name, fault, start):
            told.append(f"{name} {fault}: {wrong}")
    return told
