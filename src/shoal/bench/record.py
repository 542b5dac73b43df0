"""Head of every record: commit, machine, load, versions and time."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from shoal.errors import InputError
from shoal.runtime.cores import logical_cores, physical_cores
from shoal.runtime.device import bf16_is_native, select_device
from shoal.runtime.files import read_json

T = TypeVar("T")

_HERE = Path(__file__).resolve().parent
_CODE = ("src", "benchmarks", "tests", "tools", "pyproject.toml", "constraints.txt", ":!benchmarks/records")


@functools.cache
def begin() -> tuple[str | None, bool | None, list[float]]:
    """Return commit, whether the tree is clean, and the load. Call it before the first measurement.

    Later calls return the values of the first one.
    """
    return *source(), _load()


def source(folder: Path = _HERE) -> tuple[str | None, bool | None]:
    """Return the commit of the code in `folder`, and whether all code is as committed.

    Both are None if the code is not in a git repository. Records and pages do not count as code.
    """
    try:
        if not _git(folder, "ls-files", "."):  # an installed Shoal may be inside another repository
            return None, None
        commit, root = _git(folder, "rev-parse", "HEAD", "--show-toplevel")
        return commit, not _git(Path(root), "status", "--porcelain", "--", *_CODE)
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _git(folder: Path, *words: str) -> list[str]:
    # As root, which two hosts need, git would reject the repository of another user.
    command = ["git", "--no-optional-locks", "-c", "safe.directory=*", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _load() -> list[float]:
    return [round(one, 2) for one in os.getloadavg()]


def describe(name: str) -> dict[str, Any]:
    """Return the head of a record of measurements since `begin`, with this machine and code."""
    device = select_device("auto", 0, 1)
    commit, clean, load = begin()
    return {
        "name": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "clean": clean and source() == (commit, clean),  # and not changed meanwhile
        "load": {"before": load, "after": _load()},
        "machine": {
            "device": device.name,
            "bf16_in_hardware": bf16_is_native(device.torch_device),
            "physical_cores": physical_cores(),
            "logical_cores": logical_cores(),
            "system": platform.system(),
        },
        "versions": {"python": sys.version.split()[0], "torch": version("torch"), "shoal": version("shoal")},
    }


def held(output: Path | None, name: str, options: dict[str, Any], kind: type[T]) -> list[T]:
    """Return the rows of a record that the same command began on this machine; none if there is no file.

    Raises:
        InputError: The file holds something else.
    """
    if output is None or not output.exists():
        return []
    found, what = read_json(output, "record"), f"{output} is not a record of shoal bench {name}"
    if not isinstance(found, dict) or found.get("name") != name:
        raise InputError(what, hint="choose another --output")
    try:
        rows = TypeAdapter(list[kind]).validate_python(found.get("rows"))  # type: ignore[valid-type]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("rows", *first["loc"])))
        raise InputError(
            f"{what}: {where}: {first['msg'].lower()}", hint="choose another --output"
        ) from error
    if found.get("options") != options or found.get("machine") != describe(name)["machine"]:
        raise InputError(
            f"{output} is the record of other measurements",
            hint="choose another --output, or the same options and machine",
        )
    return rows
