"""What torch.compile needs of the machine: a compiler, and a folder that keeps what it made."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch


def missing_compiler(device: torch.device, env: Mapping[str, str] | None = None) -> str | None:
    """Say what torch.compile would miss for this device; None where all is there."""
    env = os.environ if env is None else env
    path = env.get("PATH")
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        names = [env["CC"]] if env.get("CC") else ["gcc", "clang"]
    else:
        default = "clang++" if platform.system() == "Darwin" else "g++"
        names = [env.get("CXX") or default]
    if not any(shutil.which(name, path=path) for name in names):
        return f"there is no C++ compiler ({' or '.join(names)}) on this machine"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python's header files (Python.h) are not installed"
    return None


def keep_compiled_in(folder: Path) -> None:
    """Let torch.compile keep its kernels in `folder`.

    Restarts and the other ranks find them there, and so run the very same kernels. A value that is set
    already is no user's choice: torch itself sets one when its compiler is loaded.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())
