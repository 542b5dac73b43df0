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

FOLDER = Path.home() / ".cache" / "shoal" / "frameworks"
_READY = "ready"  # is there once all is installed


@dataclass(frozen=True)
class Environment:
    """What a framework needs; sizes are those of a new environment on Linux with Python 3.11."""

    packages: tuple[str, ...]
    size_mb: int


ENVIRONMENTS = {
    "jax": Environment(("jax==0.10.2", "numpy==2.4.6"), 623),
    "tensorflow": Environment(("tensorflow-cpu==2.21.0", "keras", "numpy"), 1500),
    "paddle": Environment(("paddlepaddle==3.3.1", "numpy"), 1500),
    "mxnet": Environment(("mxnet==1.9.1", "numpy==1.23.5"), 400),
}
FRAMEWORKS = ("pytorch", *ENVIRONMENTS)


def check_names(names: tuple[str, ...]) -> None:
    """Raise an InputError for a framework that has no adapter."""
    for name in names:
        if name not in FRAMEWORKS:
            raise InputError(f"unknown framework {name!r}", hint=nearest(name, FRAMEWORKS))


def python_of(framework: str, given: Mapping[str, str]) -> str | None:
    """Return the Python that has a framework: the one given, the one installed, or None."""
    if framework in given:
        return given[framework]
    if framework not in ENVIRONMENTS:
        return sys.executable
    folder = FOLDER / framework
    return str(folder / "bin" / "python") if (folder / _READY).exists() else None


def command(install: tuple[str, ...], uninstall: tuple[str, ...]) -> int:
    """Remove and install environments, and list them all."""
    check_names((*install, *uninstall))
    console = Console()
    for name in (*install, *uninstall):
        if name not in ENVIRONMENTS:
            raise InputError(
                f"{name} runs in Shoal's own environment", hint="nothing is to be installed or removed"
            )
    for name in uninstall:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    for name in install:
        _install(name, console)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("framework", "packages", "size", "installed"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    table.add_row("pytorch", "with Shoal", "", "yes")
    for name, one in ENVIRONMENTS.items():
        table.add_row(
            name, " ".join(one.packages), f"{one.size_mb} MB", "yes" if python_of(name, {}) else "no"
        )
    console.print(table)
    return 0


def _install(name: str, console: Console) -> None:
    folder, one = FOLDER / name, ENVIRONMENTS[name]
    if (folder / _READY).exists():
        console.print(f"{name} is installed in {folder}")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(FOLDER).free / 1e6
    console.print(f"{name}: {' '.join(one.packages)}, some {one.size_mb} MB in {folder}")
    if free < 2 * one.size_mb:  # pip's downloads need room, too
        raise InputError(
            f"{free:,.0f} MB are free in {FOLDER}, and {name} needs {2 * one.size_mb:,}", hint="make room"
        )
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted installation has left
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--progress-bar=off", "-q", *one.packages]
    done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ShoalError(
            f"pip could not install {name}: {done.stderr.strip()[-500:]}", hint="see above, and try again"
        )
    (folder / _READY).touch()
