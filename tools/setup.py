"""Make .venv and install Shoal into it; `make setup` and `make demo` call this when what they need changed.

EXTRAS names the extras of pyproject.toml to install: `test` holds all that Shoal can use, the demonstration
needs less. pip's output goes into .venv/setup.log, and to the screen where it failed.

A torch that is there and new enough is kept. Otherwise constraints.txt says which version, and the machine
says which build: on Linux without an NVIDIA GPU the CPU one, since PyPI's brings gigabytes of CUDA libraries.

With VENV and TORCH_VERSION set, it makes another environment with that version in its ordinary build, which
on Linux is the CUDA one; that installs and imports without a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
VENV = ROOT / os.environ.get("VENV", ".venv")
VENV_PYTHON = VENV / "bin" / "python"
OTHER_TORCH = os.environ.get("TORCH_VERSION", "")
EXTRAS = os.environ.get("EXTRAS", "test")
LOG = VENV / "setup.log"
# The test tools import nearly all; the demonstration does not, and modules are compiled when first imported.
COMPILE = [] if EXTRAS == "test" else ["--no-compile"]
POLL_S = 0.2
NEEDED_BYTES = 9_000_000_000  # for an environment with the CUDA build, and pip's downloads on the way
OLDEST_TORCH = (2, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def runs(python: str | Path, code: str) -> bool:
    """Say whether `python` runs `code` without an error."""
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:  # it is not there, or leads nowhere
        return False


def good_torch(python: str | Path) -> str | None:
    """Return the version of the torch that `python` has; None: none, too old, or not the one asked for."""
    probe = "import importlib.metadata as m; print(m.version('torch'))"
    version = subprocess.run(
        [python, "-c", probe], capture_output=True, text=True, check=False
    ).stdout.strip()
    found = re.match(r"(\d+)\.(\d+)", version)
    new_enough = found is not None and (int(found[1]), int(found[2])) >= OLDEST_TORCH
    return version if new_enough and OTHER_TORCH in ("", version.partition("+")[0]) else None


def usable_venv() -> bool:
    """Say whether .venv can stay: it runs, is new enough, and has a good torch or this Python's version."""
    works = runs(VENV_PYTHON, "import pip, sys; sys.exit(sys.version_info < (3, 11))")
    same = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    return works and (good_torch(VENV_PYTHON) is not None or runs(VENV_PYTHON, same))


def make_venv() -> None:
    """Create .venv, with sight of the base Python's packages where these hold a good torch."""
    is_base = sys.prefix == sys.base_prefix
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stage(f"Create {VENV.name} with Python {version}")
    sight = ["--system-site-packages"] if is_base and good_torch(sys.executable) else []
    if subprocess.run([sys.executable, "-m", "venv", "--clear", *sight, VENV], check=False).returncode:
        sys.exit(
            f"error: {sys.executable} cannot make a virtual environment\n  hint: install its venv module "
            "(Debian, Ubuntu: apt install python3-venv), or use another one: make setup PYTHON=..."
        )


def pip_install(*arguments: str | Path, complain: bool = True) -> bool:
    """Run `pip install` in .venv and say whether it worked; a failure prints what pip wrote."""
    with LOG.open("a+", errors="replace") as log:
        start = log.tell()
        command = [VENV_PYTHON, "-m", "pip", "install", "--progress-bar=off", *COMPILE, *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        began = time.monotonic()
        while process.poll() is None:
            time.sleep(POLL_S)
            log.seek(start)
            show(log.read(), time.monotonic() - began)
        log.seek(start)
        if process.returncode and complain:
            print(f"\n{log.read()}", file=sys.stderr)
    return process.returncode == 0


def show(output: str, seconds: float) -> None:
    """Show the time so far and the last line of pip's output, on a terminal and within 80 columns."""
    if sys.stdout.isatty():
        last = " ".join((output.splitlines() or [""])[-1].split())
        print(f"\r\033[K  {seconds:3.0f} s  {last[:70]}", end="", flush=True)


def stage(text: str) -> None:
    """Print the line of a stage in place of the progress of the one before."""
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{clear}{text}", flush=True)


def has_gpu() -> bool:
    """Say whether an NVIDIA driver is here."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def install_torch(version: str, source: str) -> bool:
    """Install torch alone, from `source` (index URL, folder of wheels, wheel) or as fits this machine."""
    exact = f"torch=={version}"
    if source.endswith(".whl"):
        return pip_install("--no-deps", source)
    if source and Path(source).is_dir():
        return pip_install("--no-deps", "--no-index", "--find-links", Path(source).resolve(), exact)
    if source:
        return pip_install("--no-deps", "--index-url", source, exact)
    if sys.platform != "linux" or has_gpu() or OTHER_TORCH:
        return pip_install("--no-deps", exact)
    # PyPI accepts no "+cpu": what pip finds by that name comes from a mirror or folder it is configured with.
    return pip_install("--no-deps", f"{exact}+cpu", complain=False) or pip_install(
        "--no-deps", "--index-url", CPU_INDEX, f"{exact}+cpu"
    )


def ensure_torch() -> str:
    """Return the version of .venv's torch, installed first where there is no good one."""
    if version := good_torch(VENV_PYTHON):
        stage(f"Keep torch {version}, which is installed already")
        return version
    wanted = OTHER_TORCH or re.findall(r"(?m)^torch==(\S+)$", CONSTRAINTS.read_text())[0]
    stage(f"Install torch {wanted}")
    source = os.environ.get("TORCH_SOURCE", "")
    if not install_torch(wanted, source):
        sys.exit(
            f"error: no torch {wanted} for this machine in {source or f'what pip knows, nor {CPU_INDEX}'}\n"
            "  hint: name a source: make setup TORCH_SOURCE=<index URL, folder of wheels, or .whl file>; "
            "or install torch >= 2.11 into .venv yourself: it is kept"
        )
    return good_torch(VENV_PYTHON) or wanted


def pins_beside(torch: str, requirements: list[str]) -> str:
    """Return constraints.txt with this torch, so that nothing replaces it.

    What another version than ours requires is left to that: torch 2.11 wants a setuptools older than ours.
    """
    text = CONSTRAINTS.read_text()
    if f"torch=={torch.partition('+')[0]}\n" not in text:
        for name in (re.split(r"[^\w.-]", requirement)[0] for requirement in requirements):
            text = re.sub(rf"(?mi)^{re.sub('[-_.]', '[-_.]', name)}==.*\n", "", text)
    return re.sub(r"(?m)^torch==.*$", f"torch=={torch}", text)


def torch_requirements() -> list[str]:
    """Return what .venv's torch says that it requires."""
    probe = "import importlib.metadata as m; print(*(m.requires('torch') or []), sep='\\n')"
    told = subprocess.run([VENV_PYTHON, "-c", probe], capture_output=True, text=True, check=False)
    return [line for line in told.stdout.splitlines() if "extra ==" not in line]


def refuse_small_disk() -> None:
    """Say how much another torch takes; end where there is no room for it."""
    free = shutil.disk_usage(ROOT).free
    print(f"{VENV.name}: torch {OTHER_TORCH}; with CUDA libraries a download of some 2.5 GB, 6 GB installed")
    if free < NEEDED_BYTES:
        sys.exit(
            f"error: {free / 1e9:.1f} GB are free here, and it may take {NEEDED_BYTES / 1e9:.0f} GB\n"
            "  hint: make room, or name a smaller build: TORCH_SOURCE=<index URL, folder, .whl file>"
        )


def main() -> None:
    """Bring .venv to what pyproject.toml and constraints.txt ask for."""
    if not usable_venv():
        if OTHER_TORCH:
            refuse_small_disk()
        make_venv()
    version = ensure_torch()
    pins = VENV / "constraints.txt"
    pins.write_text(pins_beside(version, torch_requirements()))
    stage(f"Install Shoal with [{EXTRAS}] and the packages that it needs")
    if not pip_install("-c", pins, "-e", f".[{EXTRAS}]"):
        sys.exit("error: pip could not install Shoal\n  hint: see its message above, and run it again")
    stage("Check that torch and Shoal start")
    if not runs(VENV_PYTHON, "import torch, shoal"):
        sys.exit(
            "error: torch was installed, but does not start\n  hint: see .venv/bin/python -c 'import torch'; "
            "name another source: make clean, then make setup TORCH_SOURCE=..."
        )
    stage(f"{VENV.name} is ready; pip's output is in {os.path.relpath(LOG, ROOT)}")


if __name__ == "__main__":
    main()
