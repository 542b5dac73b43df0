"""Mutation testing: change one thing in the code, and see whether a test notices.

    python -m tools.mutate                        # all groups; a run that was stopped goes on where it was
    python -m tools.mutate --only data gradsync   # these alone; or modules: --only data/loader.py
    python -m tools.mutate --list                 # what would be changed
    python -m tools.mutate --survivors            # what no test has noticed so far

In each group of modules some mutations are drawn by rule (tools/mutate/rules.py), the same in every run with
the same --seed. First every test file of a group runs once in an instrumented copy, which tells the tests
that touch each block of code (tools/mutate/touched.py); then each mutant gets its tests, the fast ones and
those that have killed before first, until one fails. Results are kept in --folder, by mutation and by the
digest of its file. mutmut and cosmic-ray do not see which tests reach code in worker processes, and the
latter starts a pytest anew for each mutant: 10 s of imports for a test of 0.1 s.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
import tomllib
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from tools.mutate import judge
from tools.mutate.rules import Mutation, mutations, sample
from tools.mutate.touched import Touches, digest

ROOT = Path(__file__).resolve().parents[2]
GROUPS = Path(__file__).parent / "groups.toml"
MARK = 0.9  # share of killed mutations in each group
_MAP_LIMIT_S = 1800.0
Results = dict[str, dict[str, Any]]


def read_results(folder: Path) -> Results:
    """Return the last result of each mutation; a line cut off by a kill is no result."""
    results: Results = {}
    if (folder / "results.jsonl").exists():
        for line in (folder / "results.jsonl").read_text().splitlines():
            if line.endswith("}"):
                result = json.loads(line)
                results[result["key"]] = result
    return results


class Run:
    """Mutations on their way through the slots."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, Path(args.folder)
        self.groups = tomllib.loads(Path(args.groups).read_text())
        self.equivalent = self.groups.pop("equivalent", {})
        self.place = judge.Place(Path(args.root), self.groups.pop("package"), args.patience)
        self.results = read_results(self.folder)
        self.kills = Counter(r["test"] for r in self.results.values() if r["test"])
        self.drawn = self._draw()
        self.touches: Touches | None = None

    def _draw(self) -> list[tuple[str, Mutation]]:
        """Draw each group's mutations, then keep those that were asked for."""
        drawn, only = [], self.args.only
        for group, of in self.groups.items():
            found: list[Mutation] = []
            for path in [
                path for pattern in of["modules"] for path in sorted(self.place.source.glob(pattern))
            ]:
                found += mutations(path.relative_to(self.place.source).as_posix(), path.read_bytes())
            counting = [mutation for mutation in found if mutation.key not in self.equivalent]
            drawn += [(group, mutation) for mutation in sample(counting, self.args.per_group, self.args.seed)]
        if only:
            drawn = [
                (group, m)
                for group, m in drawn
                if any(o == group if o in self.groups else o in m.path for o in only)
            ]
        if not drawn:
            raise SystemExit(f"error: no mutation: --only takes parts of paths, or {', '.join(self.groups)}")
        return drawn

    def test_files(self, group: str) -> list[str]:
        """Return the test files of a group."""
        paths = [
            path for pattern in self.groups[group]["tests"] for path in sorted(self.place.root.glob(pattern))
        ]
        return list(dict.fromkeys(path.relative_to(self.place.root).as_posix() for path in paths))

    def tests_of(self, group: str, mutation: Mutation) -> list[tuple[str, float]]:
        """Return the tests that touch a mutation, in the order in which they are tried, within the budget."""
        assert self.touches is not None
        seconds = self.touches.seconds
        path = self.place.source / mutation.path
        files = self.test_files(group)
        own = self.groups[group].get("compiled", {}).get(mutation.path)
        tests = self.touches.of(mutation.path, mutation.where, mutation.line, path.read_bytes())
        if own:  # nothing was written into it: all tests of these files
            tests = {test for test in seconds if test.partition("::")[0] in own}
        tests = {test for test in tests if test.partition("::")[0] in files}
        cost = {test: seconds[test] / (1 + 3 * self.kills[test]) for test in tests}
        total, ordered = 0.0, list[tuple[str, float]]()
        for test in sorted(tests, key=lambda test: (cost[test], test)):
            total += seconds[test]
            if ordered and total > self.args.budget:
                break
            ordered.append((test, seconds[test]))
        return ordered

    def state(self, mutation: Mutation) -> str:
        """Digest what a result depends on beside the tests."""
        return digest(self.place.source / mutation.path)

    def result(self, group: str, mutation: Mutation) -> dict[str, Any] | None:
        """Return what is known and still holds: survivors are tried again when a test has changed."""
        known = self.results.get(mutation.key)
        if known is None or known["status"] == "unclear" or known["source"] != self.state(mutation):
            return None
        if known["status"] in ("killed", "time-out") or self.touches is None:
            return known
        return known if known["files"] == self._digests(self.tests_of(group, mutation)) else None

    def _digests(self, tests: list[tuple[str, float]]) -> dict[str, str]:
        files = sorted({test.partition("::")[0] for test, _ in tests})
        return {file: digest(self.place.root / file) for file in files}

    def go(self) -> None:
        """Map what is not mapped, then judge what is not judged."""
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(self.args.jobs, context, initializer=judge.be_a_slot) as slots:
            for group in dict(self.drawn):
                self._map(slots, group)
                self.touches = Touches(self.folder / "touched", self.place.source)
                self._judge(slots, group)

    def _map(self, slots: ProcessPoolExecutor, group: str) -> None:
        due = {}
        for file in self.test_files(group):
            target = self.folder / "touched" / (file.replace("/", "-") + ".json")
            known = json.loads(target.read_text())["file"] if target.exists() and not self.args.map else ""
            if known != digest(self.place.root / file):
                due[slots.submit(judge.map_file, self.place, file, target, _MAP_LIMIT_S)] = file
        for number, done in enumerate(_as_completed(due), start=1):
            say(f"[{group} tests {number:2}/{len(due)}] {due[done]}: {done.result()}")

    def _judge(self, slots: ProcessPoolExecutor, group: str) -> None:
        due = [m for g, m in self.drawn if g == group and self.result(g, m) is None]
        total, running = len(due), dict[Future[judge.Verdict], tuple[Mutation, list[tuple[str, float]]]]()
        while due or running:
            while due and len(running) < self.args.jobs:
                mutation = due.pop(0)
                tests = self.tests_of(group, mutation)
                mutant = mutation.apply((self.place.source / mutation.path).read_bytes())
                future = slots.submit(judge.judge, self.place, mutation.path, mutant, tests)
                running[future] = mutation, tests
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                mutation, tests = running.pop(done)
                self._keep(mutation, done.result(), tests)
                number = total - len(due) - len(running)
                say(f"[{group} {number:2}/{total}] {line_of(mutation, self.results[mutation.key])}")

    def _keep(self, mutation: Mutation, verdict: judge.Verdict, tests: list[tuple[str, float]]) -> None:
        result = {
            "key": mutation.key,
            "source": self.state(mutation),
            **vars(verdict),
            "files": self._digests(tests),
        }
        self.results[mutation.key] = result
        self.kills[verdict.test] += bool(verdict.test)
        with (self.folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")


def _as_completed(futures: dict[Future[str], str]) -> Any:
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        yield from done


def line_of(mutation: Mutation, result: dict[str, Any]) -> str:
    """Return one line about a mutation and what became of it."""
    by = f"  by {result['test']}" if result["test"] else f"  {result['tests']} tests"
    where = f"{mutation.path}:{mutation.line}"
    return f"{result['status']:8} {result['seconds']:5.1f} s  {where} {mutation.key.partition(':')[2]}{by}"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def summary(run: Run) -> dict[str, Any]:
    """Return counts by group and by module, and what survived."""
    groups: dict[str, Any] = {}
    for group in dict(run.drawn):
        found = [(m, run.result(g, m)) for g, m in run.drawn if g == group]
        known = [(m, result) for m, result in found if result]
        killed = [m for m, result in known if result["status"] in ("killed", "time-out")]
        groups[group] = {
            "mutations": len(found),
            "not_run": len(found) - len(known),
            "killed": len(killed),
            "of_these_by_time_out": sum(result["status"] == "time-out" for _, result in known),
            "share": round(len(killed) / max(1, len(known)), 3),
            "modules": {
                path: f"{sum(m.path == path for m in killed)} of {sum(m.path == path for m, _ in known)}"
                for path in sorted({m.path for m, _ in known})
            },
            "survivors": [f"{m.path}:{m.line} {m.key}" for m, result in known if m not in killed],
        }
    return groups


def main(argv: list[str] | None = None) -> int:
    """Do what the arguments say; return 1 where a group is below its mark."""
    parser = argparse.ArgumentParser("python -m tools.mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups, or parts of paths")
    parser.add_argument("--list", action="store_true", help="list the mutations, run nothing")
    parser.add_argument("--survivors", action="store_true", help="list what no test has noticed, run nothing")
    parser.add_argument("--per-group", type=int, default=25, help="mutations of each group (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="draw other mutations (default: 0)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="at a time")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tests for one (default: 120)")
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds before a test hangs, beside 5 x its usual"
    )
    parser.add_argument("--map", action="store_true", help="find out anew which tests touch what")
    parser.add_argument("--folder", default=str(ROOT / "runs" / "mutate"), help="where results are kept")
    parser.add_argument("--groups", default=str(GROUPS), help="the file that names modules and tests")
    parser.add_argument("--root", default=str(ROOT), help="the project, with src/ in it")
    args = parser.parse_args(argv)
    run = Run(args)
    if args.list:
        for group, mutation in run.drawn:
            print(f"{group:10} {mutation.rule:10} {mutation.key} (line {mutation.line})")
        return 0
    if not args.survivors:
        os.nice(19)
        run.folder.mkdir(parents=True, exist_ok=True)
        judge.load(run.place)
        run.go()
    run.touches = None
    groups = summary(run)
    for group, found in groups.items():
        ran = found["mutations"] - found["not_run"]
        print(f"{group}: {found['killed']} killed of {ran}, {found['share']:.0%}")
        print("\n".join(f"  {survivor}" for survivor in found["survivors"]))
    usual = all(getattr(args, n) == parser.get_default(n) for n in ("root", "groups", "seed", "per_group"))
    if usual and not (args.survivors or args.only):
        write_record = importlib.import_module("benchmarks.record").write_record
        write_record(
            "mutate", {"mark": MARK, "seed": args.seed, "equivalent": len(run.equivalent), "groups": groups}
        )
    return int(any(found["share"] < MARK for found in groups.values()))


if __name__ == "__main__":
    sys.exit(main())
