"""Faults of the files in a run folder, and what a start makes of them."""

from __future__ import annotations

import logging
import os
import random
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from shoal.checkpoint.manifest import committed, verify
from shoal.errors import ShoalError
from shoal.runtime.log import log
from shoal.runtime.run_folder import held
from shoal.train import metrics
from tests.checkpoint.damage import cut_short, flip_bit, permissions_count
from tests.train.ranks import run_training


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


def files(run: Path) -> list[str]:
    """Return the files of a run folder by name, those of the newest checkpoint for both."""
    found = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return [name for name in found if "step-00000002" not in name]


def disturb(run: Path, name: str, fault: str) -> None:
    """Put a fault in the place of one file."""
    path = run / name
    if path.stat().st_size or fault not in ("flipped", "random", "truncated"):
        FAULTS[fault](path)


def check_case(pristine: Path, run: Path, name: str, fault: str, start: Callable[[Path], str]) -> str:
    """Disturb a copy of a run and start it; return what is wrong with how that went, or nothing.

    `start` returns an empty text where training went on to its end, and else what was said.
    """
    shutil.copytree(pristine, run)
    disturb(run, name, fault)
    said = start(run)
    if "Traceback" in said:
        return said
    if said and Path(name).name not in said:
        return f"it does not name the file: {said}"
    if said:
        kept = [path.name for path in committed(run / "checkpoints")]
        if kept != ["step-00000004", "step-00000002"]:
            return f"it stopped and left {kept}"
        _undo(pristine, run, name)
        if again := start(run):
            return f"the fault is undone and it does not go on: {again}"
    elif any(verify(path) for path in committed(run / "checkpoints")):
        return "a checkpoint in use is not good"
    elif "unreadable" not in fault and not (run / "checkpoints/step-00000006").is_dir():
        return "the last step is not there"
    shutil.rmtree(run)
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
            with permissions_count(), held(run), mock.patch.object(metrics, "draw_curve"):  # most of the time
                result = run_training(run, values)
        except ShoalError as error:
            return str(error)
        except Exception:
            return traceback.format_exc()
        same = all(np.array_equal(result["weights"][name], weight) for name, weight in expected.items())
        return "" if same and result["done"] else "Traceback: other weights"

    log.setLevel(logging.CRITICAL)
    told = []
    every = [(name, fault) for name in files(pristine) for fault in FAULTS]
    for number, (name, fault) in enumerate(every[shift::stride]):
        if wrong := check_case(pristine, base / f"run-{number}", name, fault, start):
            told.append(f"{name} {fault}: {wrong}")
    return told
