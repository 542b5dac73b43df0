"""Make .venv and install Shoal into it; `make setup` calls this when pyproject.toml or constraints.txt changed.

A torch that is there and new enough is kept. Otherwise constraints.txt says which one, and the machine says which build:
on Linux without an NVIDIA GPU the CPU build, since the one on PyPI comes with gigabytes of CUDA libraries.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
OLDEST_TORCH = (2, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def fail(message: str, hint: str) -> None:
    """Stop with a sentence and what to do."""
    sys.exit(f"error: {message}\n  hint: {hint}")


def good_torch(python: str | Path) -> str | None:
    """Return the version of the torch that `python` can import, or None where it is absent, broken or too old."""
    probe = "import torch; print(torch.__version__)"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    version = done.stdout.strip()
    found = re.match(r"(\d+)\.(\d+)", version)
    return version if found and (int(found[1]), int(found[2])) >= OLDEST_TORCH else None


def make_venv() -> None:
    """Create .venv, with sight of the base Python's packages where these hold a good torch."""
    options = ["--clear"]
    if good_torch(sys.executable):
        options.append("--system-site-packages")
    if subprocess.run([sys.executable, "-m", "venv", *options, VENV], check=False).returncode:
        fail(
            f"{sys.executable} cannot make a virtual environment",
            "install its venv module (Debian: apt install python3-venv) or name another one: make setup PYTHON=...",
        )


def usable_venv() -> bool:
    """Tell whether .venv has a Python that runs, with pip, and is new enough."""
    probe = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    return VENV_PYTHON.exists() and subprocess.run([VENV_PYTHON, "-c", probe], check=False).returncode == 0


def pip_install(*arguments: str | Path, quiet_failure: bool = False) -> bool:
    """Run pip in .venv; `quiet_failure` keeps its complaints off the screen where another source follows."""
    stderr = subprocess.DEVNULL if quiet_failure else None
    command = [VENV_PYTHON, "-m", "pip", "install", *arguments]
    return subprocess.run(command, stderr=stderr, cwd=ROOT, check=False).returncode == 0


def install_torch(version: str, source: str) -> bool:
    """Install one torch from `source` (index URL, folder of wheels, wheel) or from where this machine should get it."""
    exact = f"torch=={version}"
    if source.endswith(".whl"):
        return pip_install("--no-deps", source)
    if source and Path(source).is_dir():
        return pip_install("--no-deps", "--no-index", "--find-links", Path(source).resolve(), exact)
    if source:
        return pip_install("--no-deps", "--index-url", source, exact)
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        return pip_install("--no-deps", exact)
    # "+cpu" is a name that PyPI does not accept: found on what pip is configured with, it is a mirror of CPU builds.
    return pip_install("--no-deps", f"{exact}+cpu", quiet_failure=True) or pip_install(
        "--no-deps", "--index-url", CPU_INDEX, f"{exact}+cpu"
    )


def pins(torch_version: str | None) -> Path:
    """Write constraints.txt's pins beside .venv's packages, with torch pinned to the one that is installed."""
    text = (ROOT / "constraints.txt").read_text()
    path = VENV / "constraints.txt"
    path.write_text(re.sub(r"(?m)^torch==.*$", f"torch=={torch_version}", text))
    return path


def pinned_torch() -> str:
    """Read which torch constraints.txt asks for."""
    found = re.search(r"(?m)^torch==(\S+)$", (ROOT / "constraints.txt").read_text())
    if found is None:
        fail("constraints.txt pins no torch", "add a line torch==VERSION")
    assert found
    return found[1]


def main() -> None:
    """Bring .venv to what pyproject.toml and constraints.txt ask for."""
    if not usable_venv():
        make_venv()
    version, wanted, source = good_torch(VENV_PYTHON), pinned_torch(), os.environ.get("TORCH_SOURCE", "")
    if version is None:
        print(f"installing torch {wanted}", flush=True)
        if not install_torch(wanted, source) or (version := good_torch(VENV_PYTHON)) is None:
            fail(
                f"no torch {wanted} for this machine from {source or 'pip configuration or ' + CPU_INDEX}",
                "name a source: make setup TORCH_SOURCE=<index URL, folder of wheels, or .whl file>; "
                "or install torch >= 2.11 into .venv yourself, it is kept",
            )
    print(f"torch {version} is in place; installing shoal", flush=True)
    if not pip_install("-c", pins(version), "-e", ".[test]"):
        fail(
            "pip could not install shoal", "its message is above; run make setup again, what is there is kept"
        )


if __name__ == "__main__":
    main()
