"""Check Shoal on a CUDA machine: run the GPU tests, time the part, write a record; under 10 minutes a part.

    make gpu-check PART=train [WHEELS=folder] [PYTHON=python3.12]

Uses the Python it is started with and needs no network and no installation: what that Python lacks comes from
a folder of wheels (`make wheels` fills one), unpacked into a temporary folder.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("numpy", "pydantic", "cyclopts", "xxhash", "tokenizers", "safetensors", "pytest", "pytest_timeout")
PROBE = f"""
import importlib.util, json, sys
missing = [name for name in {MODULES!r} if importlib.util.find_spec(name) is None]
if importlib.util.find_spec("torch") is None:
    print(json.dumps(dict(torch=None, devices=0, missing=missing)))
    sys.exit()
import torch
print(json.dumps(dict(torch=torch.__version__, devices=torch.cuda.device_count(), missing=missing)))
"""
OLDEST_TORCH = (2, 11)
BUDGET_S = 570.0  # of a part
TESTS_S = 240.0  # of it for the tests, at most
GRACE_S = 110.0  # left for the measurement that has begun when the timing begins nothing more


def refuse(message: str, hint: str) -> None:
    """End with a sentence and what to do."""
    sys.exit(f"error: {message}\n  hint: {hint}")


def install_missing(wheels: Path, site: Path) -> None:
    """Unpack into `site` the wheels of what this Python lacks; what it has stays as it is."""
    held = {_canonical(entry.name) for entry in importlib.metadata.distributions() if entry.name}
    found = sorted(wheels.glob("*.whl"))
    if not found:
        refuse(f"{wheels} holds no wheels", "fill it with `make wheels` on a machine with a network")
    wanted = [wheel for wheel in found if _canonical(wheel.name.split("-")[0]) not in held]
    if wanted:
        print(f"from {wheels}: {', '.join(wheel.name.split('-')[0] for wheel in wanted)}", flush=True)
        quiet = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--root-user-action=ignore"]
        command = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(site), *map(str, wanted)]
        if subprocess.run(command, check=False).returncode:
            refuse(f"pip could not install from {wheels}", "its own words are above; is it for this Python?")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def describe_shoal(site: Path) -> None:
    """Write the metadata that an installation of this source tree would have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )


def check_python(environment: dict[str, str], device: str) -> int:
    """Refuse a Python that cannot do it: no torch, too old a one, no CUDA, or packages missing.

    Returns the number of CUDA devices.
    """
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=False
    )
    if probe.returncode:
        refuse(f"{sys.executable} cannot import torch", probe.stderr.strip().splitlines()[-1])
    seen = json.loads(probe.stdout)
    if seen["torch"] is None:
        refuse(f"{sys.executable} has no torch", "name a Python that has it: make gpu-check PYTHON=...")
    if tuple(map(int, seen["torch"].split(".")[:2])) < OLDEST_TORCH:
        refuse(f"torch {seen['torch']} is too old", "Shoal needs 2.11 or newer")
    if seen["missing"]:
        refuse(
            f"{sys.executable} lacks {', '.join(seen['missing'])}",
            "run `make wheels` on a machine with a network, then make gpu-check WHEELS=wheels",
        )
    if device == "cuda" and not seen["devices"]:
        refuse(f"torch {seen['torch']} sees no CUDA device here", "gpu-check is for machines with a GPU")
    return int(seen["devices"])


@dataclass(frozen=True)
class Part:
    """GPU tests, and the words after `python -m` that time it: of wishes, seconds left and a free folder."""

    tests: tuple[str, ...]
    timing: Callable[[argparse.Namespace, float, Path], list[str]]


def time_training(wish: argparse.Namespace, left_s: float, folder: Path) -> list[str]:
    """Training speed beside transformers."""
    words = ["benchmarks.train_step", "--suite", "gpu", "--systems", "shoal", "transformers"]
    words += ["--device", wish.device, "--output", str(wish.output), "--limit-s", f"{left_s - GRACE_S:.0f}"]
    if wish.tiny:
        return [*words, "--tiny", "--modes", "eager", "--repeats", "1", "--steps", "2", "--warmup", "1"]
    return [*words, "--steps", "5"]


def time_layouts(wish: argparse.Namespace, left_s: float, folder: Path) -> list[str]:
    """The layouts that the devices here allow."""
    words = ["benchmarks.layouts", "--device", wish.device, "--output", str(wish.output)]
    return [*words, "--tiny", "--layouts", "dp2", "tp2", "bare torch tp2"] if wish.tiny else words


def time_exchanges(wish: argparse.Namespace, left_s: float, folder: Path) -> list[str]:
    """A small GPT on one device, and on all by each kind of strategy."""
    from tests.tiny_dataset import random_dataset

    workers = {1, 2 if wish.tiny else wish.devices}
    words = ["shoal", "bench", "gradsync", "--networks", "gpt", "--workers", *map(str, sorted(workers))]
    words += ["--data", str(random_dataset(folder / "data")), "--json", str(wish.output)]
    words += ["--steps", "6" if wish.tiny else "100", "--strategies", "allreduce", "onebit"]
    return words if wish.tiny else [*words, "powersgd", "int8", "topk", "device_sharded"]


def time_plan(wish: argparse.Namespace, left_s: float, folder: Path) -> list[str]:
    """A step of gpt2 and each strategy's own work on the device, and what they mean for eight hosts."""
    planned = ["tiny", "--layout", "dp2"] if wish.tiny else ["gpt2", "--layout", "dp8"]
    words = ["--link", "1gbit,0.2ms", "--json", str(wish.output), "--runtime.device", wish.device]
    return ["shoal", "advise", *planned, *words]


def check(part: Part, environment: dict[str, str], wish: argparse.Namespace, folder: Path) -> int:
    """Run the tests of a part, then time it; return the worse exit status."""
    began = time.monotonic()
    tests = [f"tests/gpu/test_{name}_gpu.py" for name in part.tests]
    tested = not tests or run_tests(environment, *tests)
    left_s = BUDGET_S - (time.monotonic() - began)
    timed = run([sys.executable, "-m", *part.timing(wish, left_s, folder)], environment, left_s)
    print(f"gpu tests: {'passed' if tested else 'FAILED'}; timing: {'done' if timed else 'FAILED'}")
    return 0 if tested and timed else 1


def run_tests(environment: dict[str, str], *paths: str) -> bool:
    """Run GPU tests; say whether they passed."""
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    return run([*pytest, *paths], environment, TESTS_S)


def run(command: list[str], environment: dict[str, str], limit_s: float) -> bool:
    """Run a command from the root of the repository; say whether it did well and within the limit."""
    try:
        return (
            subprocess.run(command, env=environment, cwd=ROOT, check=False, timeout=limit_s).returncode == 0
        )
    except subprocess.TimeoutExpired:
        print(f"error: not done after {limit_s:.0f} s: {' '.join(command[1:4])}", flush=True)
        return False


PARTS = {
    "train": Part(("train", "step", "documents"), time_training),
    "layouts": Part(("layouts",), time_layouts),
    "bench": Part(("exchange", "owners", "doctor"), time_exchanges),
    "plan": Part((), time_plan),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", default="")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what this Python lacks")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of no interest, to try all paths")
    parser.add_argument(
        "--output", type=Path, help="the record; benchmarks/records/gpu_PART.json if left out"
    )
    wish = parser.parse_args()
    wish.output = wish.output or ROOT / "benchmarks" / "records" / f"gpu_{wish.part}.json"
    if wish.part not in PARTS:
        refuse(f"PART = {wish.part!r} is not a part", f"the parts are: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        site = Path(name)
        if wish.wheels is not None:
            install_missing(wish.wheels, site)
        describe_shoal(site)
        paths = [str(ROOT / "src"), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep), str(site)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        wish.devices = check_python(environment, wish.device)
        sys.path += environment["PYTHONPATH"].split(os.pathsep)
        sys.exit(check(PARTS[wish.part], environment, wish, site / "work"))


if __name__ == "__main__":
    main()
