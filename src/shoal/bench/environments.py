"""`shoal bench frameworks`: a virtual Python of its own for each framework that is compared with PyTorch.

Versions are pinned: they were seen computing the same as PyTorch. PyTorch itself is the one that runs Shoal.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from shoal.errors import InputError, ShoalError, nearest
from shoal.runtime.files import cache_folder

_READY = "ready"  # the packages that are installed; is there once all are


@dataclass(frozen=True)
class Environment:
    """What a framework needs; sizes are those of a new environment on Linux with Python 3.11."""

    packages: tuple[str, ...]
    size_mb: int
    newest_python: tuple[int, int] | None = None  # for which there are packages

    @property
    def pins(self) -> str:
        return " ".join(self.packages)


ENVIRONMENTS = {
    "jax": Environment(("jax==0.10.2", "numpy==2.4.6"), 623),
    "tensorflow": Environment(("tensorflow-cpu==2.21.0", "numpy==2.4.6"), 1544),
    "paddle": Environment(("paddlepaddle==3.3.1", "numpy==2.4.6"), 868),
    "mxnet": Environment(("mxnet==1.9.1", "numpy==1.23.5"), 296, (3, 11)),
}
# Frameworks that the user has built or installed: nothing here can install them.
GIVEN = {
    "caffe": "no program caffe is on PATH: build BVLC Caffe 1.0, or name its program: --python caffe=PATH",
    "cntk": "CNTK 2.7, the last one, runs with Python 3.6: name one that has it with --python cntk=PATH",
}
FRAMEWORKS = ("pytorch", *ENVIRONMENTS, *GIVEN)


def _folder(framework: str) -> Path:
    return cache_folder() / "frameworks" / framework


def check_names(names: tuple[str, ...]) -> None:
    """Raise an InputError for a framework that has no adapter."""
    for name in names:
        if name not in FRAMEWORKS:
            raise InputError(f"unknown framework {name!r}", hint=nearest(name, FRAMEWORKS))


def python_of(framework: str, given: Mapping[str, str]) -> str | None:
    """Return the Python that has a framework, or Caffe's program: the one given or installed, or None."""
    if framework in given:
        return given[framework]
    if framework in GIVEN:
        return shutil.which("caffe") if framework == "caffe" else None
    if framework not in ENVIRONMENTS:
        return sys.executable
    return str(_folder(framework) / "bin" / "python") if _has(framework) == "yes" else None


def _has(framework: str) -> str:
    """Say whether a framework is installed, with the versions of today."""
    mark = _folder(framework) / _READY
    if not mark.exists():
        return "no"
    return "yes" if mark.read_text() == ENVIRONMENTS[framework].pins else "other versions"


def how_to_get(framework: str) -> str:
    """Say what is missing, and what to do."""
    hint = f"shoal bench frameworks --install {framework}, or --python {framework}=PATH"
    return GIVEN.get(framework, f"{framework} is not installed: {hint}")


def command(install: tuple[str, ...], uninstall: tuple[str, ...]) -> int:
    """Remove and install environments, and list them all."""
    check_names((*install, *uninstall))
    console = Console()
    for name in (*install, *uninstall):
        if name in GIVEN:
            raise InputError(f"{name} cannot be installed here", hint=GIVEN[name])
        if name not in ENVIRONMENTS:
            raise InputError(
                f"{name} runs in Shoal's own environment", hint="nothing is to be installed or removed"
            )
    for name in uninstall:
        shutil.rmtree(_folder(name), ignore_errors=True)
    for name in install:
        _install(name, console)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("framework", "packages", "size", "installed"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    table.add_row("pytorch", "with Shoal", "", "yes")
    for name, one in ENVIRONMENTS.items():
        table.add_row(name, one.pins, f"{one.size_mb:,} MB", _has(name))
    for name in GIVEN:
        table.add_row(name, "your own", "", "named with --python" if python_of(name, {}) is None else "yes")
    console.print(table)
    return 0


def _install(name: str, console: Console) -> None:
    folder, one = _folder(name), ENVIRONMENTS[name]
    if _has(name) == "yes":
        console.print(f"{name} is installed in {folder}")
        return
    if one.newest_python and sys.version_info[:2] > one.newest_python:
        newest = ".".join(map(str, one.newest_python))
        raise InputError(
            f"{name} has no packages for Python {sys.version.split()[0]}, the newest is {newest}",
            hint=f"install it into a Python {newest} yourself: --python {name}=PATH",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / 1e6
    console.print(f"{name}: {one.pins}, some {one.size_mb} MB in {folder}")
    if free < 2 * one.size_mb:  # pip's downloads need room, too
        raise InputError(
            f"{free:,.0f} MB are free in {folder.parent}, and {name} needs {2 * one.size_mb:,}",
            hint="make room",
        )
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted installation has left
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--progress-bar=off", "-q", *one.packages]
    done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ShoalError(
            f"pip could not install {name}: {done.stderr.strip()[-500:]}", hint="see above, and try again"
        )
    (folder / _READY).write_text(one.pins)
