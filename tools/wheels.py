"""Download what a CUDA machine with torch but without a network needs beside it; `make wheels` calls this.

The versions are those of constraints.txt. `make gpu-check WHEELS=wheels` installs there what is missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "wheels"
PYTHON = "3.12"
GLIBC = (*range(17, 40), 5)
# What shoal and its tests import and what that imports in turn; numpy comes with torch.
NEEDED = [
    "annotated-types",
    "attrs",
    "cyclopts",
    "docstring_parser",
    "hypothesis",
    "iniconfig",
    "markdown-it-py",
    "mdurl",
    "packaging",
    "pluggy",
    "pydantic",
    "pydantic_core",
    "Pygments",
    "pytest",
    "pytest-timeout",
    "regex",
    "rich",
    "rich-rst",
    "safetensors",
    "sortedcontainers",
    "tiktoken",
    "tokenizers",
    "typing-inspection",
    "typing_extensions",
    "xxhash",
]


def main() -> None:
    """Fill wheels/ from the package index."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = [f"{name}=={pins[name]}" for name in NEEDED]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *target]
    done = subprocess.run([*command, "--dest", str(TARGET), *wanted], check=False)
    if done.returncode:
        sys.exit("error: pip could not download the wheels; its own words are above")
    size = sum(wheel.stat().st_size for wheel in TARGET.glob("*.whl"))
    print(f"{len(wanted)} wheels, {size / 1e6:.0f} MB: {TARGET}")


if __name__ == "__main__":
    main()
