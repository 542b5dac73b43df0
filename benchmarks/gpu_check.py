"""Check Shoal on a CUDA machine: run GPU tests, or time something and write a record; 10 minutes a part.

    make gpu-check PART=train-tests [WHEELS=folder] [PYTHON=python3.12]
    make gpu-check PART=train

Uses the Python it is started with and needs no network and no installation: what that Python lacks comes from
a folder of wheels (`make wheels` fills one), unpacked into a temporary folder. A record is written after each
measurement, so that one that is cut off holds what there was.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("numpy", "pydantic", "cyclopts", "xxhash", "tokenizers", "safetensors", "pytest", "pytest_timeout")
PROBE = f"""
import importlib.metadata, importlib.util, json, sys
missing = [name for name in {MODULES!r} if importlib.util.find_spec(name) is None]
held = list(importlib.metadata.distributions())
versions = {{entry.name: entry.version for entry in reversed(held)}}  # the first of a name is imported
if importlib.util.find_spec("torch") is None:
    print(json.dumps(dict(torch=None, devices=0, missing=missing, versions=versions)))
    sys.exit()
import torch
versions["torch"] = torch.__version__
found = dict(torch=torch.__version__, devices=torch.cuda.device_count(), missing=missing, versions=versions)
print(json.dumps(found))
"""
BUDGET_S = 570.0  # of a part
GRACE_S = 110.0  # of it for the measurement that has begun when the timing begins nothing more
END_S = 10.0  # for what is ended to end its own processes


def refuse(message: str, hint: str) -> None:
    """End with a sentence and what to do."""
    sys.exit(f"error: {message}\n  hint: {hint}")


def install_missing(wheels: Path, site: Path) -> None:
    """Unpack into `site` the wheels of what this Python lacks or has too old; the rest stays as it is."""
    held = {
        _canonical(entry.name): entry.version for entry in importlib.metadata.distributions() if entry.name
    }
    found = sorted(wheels.glob("*.whl"))
    if not found:
        refuse(f"{wheels} holds no wheels", "fill it with `make wheels` on a machine with a network")
    oldest = requirements()
    carried = {_canonical(wheel.name.split("-")[0]): wheel.name.split("-")[1] for wheel in found}
    refuse_older(str(wheels), carried, "fill it anew with `make wheels`")
    wanted = [
        wheel
        for wheel, name in zip(found, (_canonical(wheel.name.split("-")[0]) for wheel in found), strict=True)
        if name not in held or _older(held[name], oldest.get(name, "0"))
    ]
    if wanted:
        print(f"from {wheels}: {', '.join(wheel.name.split('-')[0] for wheel in wanted)}", flush=True)
        quiet = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--root-user-action=ignore"]
        command = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(site), *map(str, wanted)]
        if subprocess.run(command, check=False).returncode:
            refuse(f"pip could not install from {wheels}", "its own words are above; is it for this Python?")


def requirements() -> dict[str, str]:
    """Return the oldest version that pyproject.toml takes of each package that Shoal or a GPU test needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tests = [line for line in project["optional-dependencies"]["test"] if line.startswith("pytest")]
    lines = [re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in (*project["dependencies"], *tests)]
    return {_canonical(line[1]): line[2] for line in lines if line}


def refuse_older(where: str, versions: dict[str, str], hint: str) -> None:
    """Refuse versions that are older than what pyproject.toml asks for."""
    known = {_canonical(name): version for name, version in versions.items()}
    for name, least in requirements().items():
        if name in known and _older(known[name], least):
            refuse(f"{where} has {name} {known[name]}, and Shoal needs {least} or newer", hint)


def _older(version: str, least: str) -> bool:
    ours, theirs = (
        [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", text)[0])]
        for text in (version, least)
    )
    width = max(len(ours), len(theirs))
    return ours + [0] * (width - len(ours)) < theirs + [0] * (width - len(theirs))


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
    refuse_older(sys.executable, seen["versions"], "install a newer one there, or carry it: WHEELS=wheels")
    if seen["missing"]:
        refuse(
            f"{sys.executable} lacks {', '.join(seen['missing'])}",
            "run `make wheels` on a machine with a network, then make gpu-check WHEELS=wheels",
        )
    if device == "cuda" and not seen["devices"]:
        refuse(f"torch {seen['torch']} sees no CUDA device here", "gpu-check is for machines with a GPU")
    return int(seen["devices"])


def time_training(wish: argparse.Namespace, folder: Path) -> list[str]:
    """Training speed beside transformers."""
    words = ["benchmarks.train_step", "--suite", "gpu", "--systems", "shoal", "transformers"]
    words += ["--device", wish.device, "--output", str(wish.output), "--limit-s", f"{BUDGET_S - GRACE_S:.0f}"]
    if wish.tiny:
        return [*words, "--tiny", "--modes", "eager", "--repeats", "1", "--steps", "2", "--warmup", "1"]
    return [*words, "--steps", "5"]


def time_layouts(wish: argparse.Namespace, folder: Path) -> list[str]:
    """The layouts that the devices here allow."""
    words = ["benchmarks.layouts", "--device", wish.device, "--output", str(wish.output)]
    return [*words, "--tiny", "--layouts", "dp2", "tp2", "bare torch tp2"] if wish.tiny else words


def time_exchanges(wish: argparse.Namespace, folder: Path) -> list[str]:
    """A small GPT on one device, and on all by each kind of strategy."""
    from tests.tiny_dataset import random_dataset

    workers = {1, 2 if wish.tiny else wish.devices}
    words = ["shoal", "bench", "gradsync", "--networks", "gpt", "--workers", *map(str, sorted(workers))]
    words += ["--data", str(random_dataset(folder / "data")), "--json", str(wish.output)]
    words += ["--steps", "6" if wish.tiny else "100", "--strategies", "allreduce", "onebit"]
    return words if wish.tiny else [*words, "powersgd", "int8", "topk", "device_sharded"]


def time_plan(wish: argparse.Namespace, folder: Path) -> list[str]:
    """A step of gpt2 and each strategy's own work on the device, and what they mean for eight hosts."""
    planned = ["tiny", "--layout", "dp2"] if wish.tiny else ["gpt2", "--layout", "dp8"]
    words = ["--link", "1gbit,0.2ms", "--json", str(wish.output), "--runtime.device", wish.device]
    return ["shoal", "advise", *planned, *words]


def time_networks(wish: argparse.Namespace, folder: Path) -> list[str]:
    """The classic networks at the article's batch sizes, in PyTorch and, where it is installed, JAX."""
    words = ["benchmarks.networks", "gpu", "--device", wish.device, "--output", str(wish.output)]
    if wish.tiny:
        return [*words, "--networks", "alexnet-r", "--batch", "2", "--steps", "2", "--warmup", "1"]
    return [*words, "--steps", "50", "--warmup", "10", "--limit-s", f"{BUDGET_S - GRACE_S:.0f}"]


# The GPU tests of a part, and the words after `python -m` that time one: of wishes and a free folder.
TESTS = {
    "train-tests": ("train", "step", "documents"),
    "layouts-tests": ("layouts",),
    "bench-tests": ("exchange", "owners", "doctor", "ceilings"),
}
TIMINGS: dict[str, Callable[[argparse.Namespace, Path], list[str]]] = {
    "train": time_training,
    "layouts": time_layouts,
    "bench": time_exchanges,
    "plan": time_plan,
    "networks": time_networks,
}
PARTS = ("train-tests", "train", "layouts-tests", "layouts", "bench-tests", "bench", "plan", "networks")


def check(wish: argparse.Namespace, environment: dict[str, str], folder: Path) -> int:
    """Run the tests of a part, or time it; return the exit status."""
    if wish.part in TESTS:
        words = ["pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--junit-xml", str(wish.output)]
        words += [f"tests/gpu/test_{name}_gpu.py" for name in TESTS[wish.part]]
    else:
        words = TIMINGS[wish.part](wish, folder)
    done = run([sys.executable, "-m", *words], environment, BUDGET_S)
    print(f"{wish.part}: {'done' if done else 'FAILED'}; {wish.output}")
    return 0 if done else 1


def run(command: list[str], environment: dict[str, str], limit_s: float) -> bool:
    """Run a command from the root of the repository; say whether it did well and within the limit.

    It is ended with all that it has started, which would keep the GPU's memory.
    """
    process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"error: not done after {limit_s:.0f} s: {' '.join(command[1:4])}", flush=True)
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", default="")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what this Python lacks")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of no interest, to try all paths")
    parser.add_argument(
        "--output", type=Path, help="the record, benchmarks/records/gpu_PART.json if left out; of tests .xml"
    )
    wish = parser.parse_args()
    ending = "xml" if wish.part in TESTS else "json"
    wish.output = (wish.output or ROOT / f"benchmarks/records/gpu_{wish.part}.{ending}").resolve()
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
        sys.exit(check(wish, environment, site / "work"))


if __name__ == "__main__":
    main()
