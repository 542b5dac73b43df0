"""Which records are older than the code that they measure, and how to renew them.

    python -m tools.records                  list all: commit, date, clean, changes since, command
    python -m tools.records --run [NAME...]  renew those named, or all that are stale (`make bench`)
    python -m tools.records --stamp          give records that name no commit the one that brought them

A record is stale where a commit after its own touched a path that it names here, or where it was made of code
that was not committed. Renewed records are no longer stale, so the same command goes on after a stop.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("benchmarks/records")

SETTINGS = ("src/shoal/runtime/allocator.py", "src/shoal/runtime/openmp.py", "benchmarks/c_library.py")
STEP = (
    "src/shoal/train",
    "src/shoal/models",
    "src/shoal/parallel",
    "src/shoal/tasks",
    "src/shoal/data/loader.py",
)
PLANNED = ("src/shoal/plan/in_flight.py", "src/shoal/plan/weights.py", "src/shoal/plan/simulate.py")
ALL_REDUCE = ("src/shoal/gradsync",)
REPLICAS = (*ALL_REDUCE, "src/shoal/strategies", "src/shoal/comm")
SAVING = ("src/shoal/checkpoint",)
STARTING = ("src/shoal/runtime", "src/shoal/launch")
WRITING = ("src/shoal/infer", "src/shoal/models")
GRADSYNC = (*STEP, *REPLICAS, "src/shoal/bench/cells.py", "src/shoal/bench/gradsync.py")
STRATEGIES = (
    "allreduce int8 onebit powersgd topk central_parallel device_sharded tree_update diloco async_sgd"
)
GRID = ("shoal", "bench", "gradsync", "--strategies", *STRATEGIES.split(" "), "--output")
ONE_GBIT = ("--workers", "2", "--link", "1gbit")
NETWORKS = ("src/shoal/networks", "src/shoal/bench/networks.py", "src/shoal/bench/frameworks")
FIVE = ("--frameworks", "pytorch", "jax", "tensorflow", "paddle", "mxnet")
SIZES = "--batch-sizes 32 128 --threads 1 2"
TIMED = ("fcn-r", "alexnet-r", "resnet-56", "lstm", *FIVE, *SIZES.split(" "))
TWO_WORKERS = "--batch-sizes 128 --threads 2 --workers 1 2 --modes default"
WORKERS = ("fcn-r", *FIVE, *TWO_WORKERS.split(" "))
FEW_STEPS = "--batch-sizes 16 64 --threads 2 --steps 10"
LARGE = ("fcn-s", "alexnet-s", "resnet-50", *FEW_STEPS.split(" "))
CURVES = ("fcn-r", *FIVE, "--data", "datasets/mnist", "--modes", "default", "--steps", "45", "--threads", "2")
PROOF = "make proof"
MUTATED = (
    "tests",
    *STEP,
    *REPLICAS,
    *SAVING,
    "src/shoal/interop",
    "src/shoal/data",
    "src/shoal/config",
    "src/shoal/runtime/mesh.py",
)


@dataclass(frozen=True)
class Entry:
    """What writes a record (words after `python -m`, or a make target), what it takes, what it measures."""

    command: Sequence[str] | str
    minutes: int
    paths: Sequence[str]
    needs: str = ""  # what `make bench` does not have: root, a GPU, hours

    @property
    def by_bench(self) -> bool:
        return not isinstance(self.command, str) and not self.needs

    @property
    def said(self) -> str:
        words = self.command if isinstance(self.command, str) else f"python -m {shlex.join(self.command)}"
        return words + (f" ({self.needs})" if self.needs else "")


def _module(name: str, minutes: int, *paths: str, words: Sequence[str] = (), needs: str = "") -> Entry:
    return Entry([f"benchmarks.{name}", *words], minutes, (f"benchmarks/{name}.py", *paths), needs)


def _gpu(part: str, *paths: str) -> Entry:
    return Entry(f"make gpu-check PART={part}", 10, paths, "a GPU")


ENTRIES = {
    "advise": _module("advise", 20, *GRADSYNC, "src/shoal/plan/advise.py", needs="root"),
    "collectives": _module("collectives", 5, "src/shoal/comm", "src/shoal/bench/collectives.py"),
    "commits": _module("commits", 20, *STEP, *REPLICAS, words=["COMMIT"], needs="a commit to compare with"),
    "cpu_train": _module(
        "train_step", 32, "benchmarks/systems.py", "benchmarks/bare_gpt.py", *SETTINGS, *STEP
    ),
    "data_parallel": _module("data_parallel", 40, *STEP, *ALL_REDUCE),
    "dedup": _module("dedup", 6, "src/shoal/data/prepare"),
    "extract": _module(
        "extract",
        2,
        "src/shoal/data/prepare/web",
        "src/shoal/data/prepare/stages",
        words=["FOLDER"],
        needs="a folder of pages",
    ),
    "evaluate": _module("evaluate", 1, "src/shoal/scoring.py", *WRITING),
    "fetch": _module("fetch", 1, "src/shoal/data/prepare/web"),
    "generate": _module("generate", 5, *WRITING),
    "gpu_bench": _gpu("bench", *GRADSYNC),
    "gpu_layouts": _gpu("layouts", "benchmarks/layouts.py", *STEP, *ALL_REDUCE),
    "gpu_networks": _gpu("networks", "benchmarks/networks.py", *NETWORKS),
    "gpu_plan": _gpu("plan", "src/shoal/plan/advise.py", "src/shoal/plan/measure.py"),
    "gpu_train": _gpu("train", "benchmarks/train_step.py", "benchmarks/systems.py", *STEP),
    "gradsync_convergence": _module("gradsync", 600, *GRADSYNC, words=["convergence"], needs="hours"),
    "gradsync_grid": Entry(
        [*GRID, f"{FOLDER}/gradsync_grid.json", "--plot", "docs/gradsync.png"], 10, GRADSYNC
    ),
    "gradsync_grid_1gbit": Entry(
        [*GRID, f"{FOLDER}/gradsync_grid_1gbit.json", "--plot", "docs/gradsync_1gbit.png", *ONE_GBIT],
        7,
        GRADSYNC,
        "root",
    ),
    "gradsync_link": _module("gradsync", 30, *GRADSYNC, words=["link"], needs="root"),
    "hook": _module("hook", 3, "src/shoal/parallel/apply.py", *ALL_REDUCE),
    "interop": _module("interop", 5, "src/shoal/interop", *SAVING),
    "kill_storm": Entry(PROOF, 8, ("benchmarks/kill_storm.py", *SAVING, *STARTING)),
    "large_corpus": _module("large_corpus", 30, "src/shoal/data/prepare"),
    "layouts": _module("layouts", 20, "benchmarks/bare_tensor_parallel.py", *SETTINGS, *STEP, *ALL_REDUCE),
    "memory": _module("memory", 2, "src/shoal/models", "src/shoal/scoring.py"),
    "mutate": Entry(["tools.mutate"], 240, ("tools/mutate", *MUTATED), needs="hours"),
    "networks": Entry(
        ["shoal", "bench", "networks", *TIMED, "--output", f"{FOLDER}/networks.json"],
        80,
        NETWORKS,
        "the frameworks",
    ),
    "networks_curves": Entry(
        ["shoal", "bench", "networks", *CURVES, "--output", f"{FOLDER}/networks_curves.json"],
        3,
        NETWORKS,
        "the frameworks, MNIST's digits in datasets/mnist",
    ),
    "networks_large": Entry(
        ["shoal", "bench", "networks", *LARGE, "--output", f"{FOLDER}/networks_large.json"], 20, NETWORKS
    ),
    "networks_workers": Entry(
        ["shoal", "bench", "networks", *WORKERS, "--output", f"{FOLDER}/networks_workers.json"],
        2,
        NETWORKS,
        "the frameworks",
    ),
    "networks_trainer": _module("networks", 30, "benchmarks/systems.py", *NETWORKS, *STEP, words=["trainer"]),
    "parity": Entry(PROOF, 1, ("tests/proof/test_parity.py", "src/shoal/parity", *STEP, *STARTING)),
    "parity_matrix": Entry(PROOF, 6, ("tests/proof/test_parity.py", "src/shoal/parity", *STEP, *REPLICAS)),
    "plan_time": _module("plan_time", 25, "src/shoal/plan", "benchmarks/layouts.py"),
    "plan_memory": _module(
        "plan_memory", 20, "src/shoal/plan/memory.py", "src/shoal/plan/activations.py", *PLANNED, *STEP
    ),
    "precision": _module("precision", 15, "src/shoal/train/precision.py", "src/shoal/models"),
    "quickstart": Entry(PROOF, 2, ("src/shoal/quickstart.py", "src/shoal/data", *STEP, *STARTING)),
    "recovery": Entry(PROOF, 2, ("tests/proof/test_training.py", *SAVING, *STARTING)),
    "reshard_large": _module("reshard_large", 3, *SAVING),
    "reshard_matrix": Entry(PROOF, 3, ("tests/proof/test_layouts.py", *SAVING, "src/shoal/parallel")),
    "save_cost": _module("save_cost", 5, *SAVING),
    "serve": _module("serve", 3, "src/shoal/infer"),
    "shakespeare": Entry(PROOF, 2, STEP),
    "test_times": Entry('make test ARGS="--record-times"', 14, ("tests",)),
    "time_split": _module(
        "time_split",
        3,
        "src/shoal/train/clock.py",
        "src/shoal/train/step.py",
        "src/shoal/runtime/flight_recorder.py",
    ),
    "tokenise": _module("tokenise", 7, "src/shoal/data/prepare", "src/shoal/data/tokenizer.py"),
    "torch_versions": _module(
        "torch_versions",
        40,
        "src/shoal/models",
        "src/shoal/parallel",
        "src/shoal/checkpoint",
        "src/shoal/train",
        *REPLICAS,
        needs="another torch",
    ),
    "weights": _module("weights", 6, *STEP, *REPLICAS, *SAVING),
}


@dataclass(frozen=True)
class State:
    """A record beside the code of today."""

    name: str
    commit: str  # the oldest that its figures come from; "" where there is no record
    date: str
    clean: bool | None
    changed: Sequence[str]  # files that it measures and that later commits touched
    commits: int  # how many did

    @property
    def stale(self) -> bool:
        return not self.commit or self.clean is False or bool(self.changed)

    @property
    def why(self) -> str:
        if not self.commit:
            return "not there"
        since = [f"{self.commits} commits to {len(self.changed)} files since"] if self.changed else []
        return ", ".join(["code not committed"] * (self.clean is False) + since) or "fresh"


def states(root: Path = ROOT) -> list[State]:
    """Return the state of every record that is known, the ones first that are there."""
    found = [_state(root, name, entry) for name, entry in ENTRIES.items()]
    return sorted(found, key=lambda state: not state.commit)


def _state(root: Path, name: str, entry: Entry) -> State:
    file = root / FOLDER / f"{name}.json"
    if not file.exists():
        return State(name, "", "", None, (), 0)
    record = json.loads(file.read_text())
    commits = [one for one in commits_of(record) if _is_here(root, one)]
    if not commits:  # of another clone, or before a rebase
        commits = _git(root, "log", "-1", "--format=%H", "--", str(FOLDER / file.name))
    oldest = max(commits, key=lambda one: len(_git(root, "rev-list", f"{one}..HEAD")), default="")
    if not oldest:  # was never committed
        return State(name, "?" * 7, record["date"], record.get("clean"), (), 0)
    paths = ("--", *entry.paths)
    changed = _git(root, "diff", "--name-only", oldest, "HEAD", *paths)
    later = _git(root, "rev-list", f"{oldest}..HEAD", *paths)
    return State(name, oldest, record["date"], record.get("clean"), changed, len(later))


def commits_of(record: dict[str, Any]) -> list[str]:
    """Return the commits that the figures of a record come from, or were committed with."""
    parts = [record, *(cell for cell in record.get("cells", []) if "commit" in cell)]
    return list(
        dict.fromkeys(one for part in parts if (one := part.get("commit") or part.get("committed_with")))
    )


def stamp(root: Path = ROOT) -> None:
    """Give each record without a commit the one that brought the file; nobody knows if its code was clean."""
    for file in sorted((root / FOLDER).glob("*.json")):
        record = json.loads(file.read_text())
        brought = _git(root, "log", "-1", "--format=%ad %H", "--date=short", "--", str(FOLDER / file.name))
        if commits_of(record) or not brought:
            continue
        date, commit = brought[0].split()
        head = {"name": file.stem, "date": record.get("date", date), "commit": None}
        head |= {"committed_with": commit, "clean": None}
        file.write_text(
            json.dumps({**head, **{key: record[key] for key in record if key not in head}}, indent=2) + "\n"
        )
        print(f"{file.stem}: {commit[:7]}")


def run(names: Sequence[str], root: Path = ROOT) -> int:
    """Renew records one after the other; return how many commands failed."""
    for name in names:
        if name not in ENTRIES or isinstance(ENTRIES[name].command, str):
            by = ENTRIES[name].said if name in ENTRIES else f"one of {', '.join(ENTRIES)}"
            raise SystemExit(f"error: {name!r} is not renewed here\n  hint: {by}")
    wanted = names or [state.name for state in states(root) if state.stale and ENTRIES[state.name].by_bench]
    for name in wanted:
        print(f"{name:21} {ENTRIES[name].minutes:4} min  {ENTRIES[name].said}")
    print(
        f"{sum(ENTRIES[name].minutes for name in wanted)} minutes in all, on a machine that does nothing else"
    )
    if _git(root, "status", "--porcelain", "--", "src", "benchmarks", "tests", "tools", f":!{FOLDER}"):
        print("code is not committed: the records will say so, and count as stale")
    failed = []
    for name in wanted:
        began = time.monotonic()
        print(f"\n*** {name}", flush=True)
        if subprocess.run([sys.executable, "-m", *ENTRIES[name].command], cwd=root, check=False).returncode:
            failed.append(name)
        print(f"*** {name}: {(time.monotonic() - began) / 60:.1f} min", flush=True)
    if failed:
        print(f"ended with another status than 0: {' '.join(failed)}")
    return len(failed)


def _is_here(root: Path, commit: str) -> bool:
    try:
        return _git(root, "cat-file", "-t", commit) == ["commit"]
    except subprocess.CalledProcessError:
        return False


def _git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", nargs="*", metavar="NAME")
    parser.add_argument("--stamp", action="store_true")
    wish = parser.parse_args()
    if wish.stamp:
        stamp()
    if wish.run is not None:
        return min(1, run(wish.run))
    for state in states():
        clean = {True: "clean", False: "not clean", None: "unknown"}[state.clean] if state.commit else ""
        said = ENTRIES[state.name].said
        print(f"{state.name:21} {state.commit[:7]:7} {state.date:10} {clean:9}  {state.why:36}  {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
