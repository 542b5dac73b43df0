"""Mutation testing: change one thing in the code, and see whether a test notices.

    python -m tools.mutate                        # all groups; goes on from what the record holds
    python -m tools.mutate --only data gradsync   # these alone; or modules: --only data/loader.py
    python -m tools.mutate --only train --tests sinks  # with these tests, as a first sieve
    python -m tools.mutate --list                 # what would be changed
    python -m tools.mutate --survivors            # what no test has noticed so far

In each group of modules some mutations are drawn by rule (tools/mutate/rules.py), the same in every run with
the same --seed. First every test file of a group runs once in an instrumented copy, which tells the tests
that touch each block of code (tools/mutate/touched.py); then each mutant gets its tests, the fast ones and
those that have killed before first, until one fails. benchmarks/records/mutate.json is written after each
one: commit it, and the next run goes on from there.
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
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any

from tools.mutate import judge
from tools.mutate.rules import Mutation, digest_part, mutations, sample
from tools.mutate.touched import Map, Touches, digest, read_map, write_map

ROOT = Path(__file__).resolve().parents[2]
MARK = 0.9  # share of killed mutations in each group
PER_GROUP = 25
_MAP_LIMIT_S = 1800.0
Tests = list[tuple[str, float]]  # each with its usual seconds


class Run:
    """Mutations on their way through the slots."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.groups = tomllib.loads((Path(args.root) / "tools/mutate/groups.toml").read_text())
        self.equivalent = self.groups.pop("equivalent", {})
        self.place = judge.Place(Path(args.root), self.groups.pop("package"), args.patience)
        self.record = self.place.root / "benchmarks/records/mutate.json"
        self.map_file = self.record.with_name("mutate_touched.json.xz")
        self.sources: dict[str, bytes] = {}
        self.drawn = {group: self._draw(group) for group in self.groups}
        self.wanted = {group: found for group, of in self.drawn.items() if (found := self._asked(group, of))}
        if not self.wanted:
            raise SystemExit(f"error: no mutation: --only takes parts of paths, or {', '.join(self.groups)}")
        held = json.loads(self.record.read_text())["results"] if self.record.exists() else {}
        self.results: dict[str, dict[str, Any]] = {
            key: result
            for key, result in held.items()
            if (result["source"], result["by"]) == self._digests_of(key, result["test"])
        }
        self.kills = Counter(result["test"] for result in self.results.values() if result["test"])
        self.touches = Touches({}, self.place.source)

    def _draw(self, group: str) -> list[Mutation]:
        found: list[Mutation] = []
        for pattern in self.groups[group]["modules"]:
            paths = sorted(self.place.source.glob(pattern))
            if not paths:
                raise SystemExit(f"error: no module matches {pattern} of group {group}")
            for path in paths:
                name = path.relative_to(self.place.source).as_posix()
                self.sources[name] = path.read_bytes()
                found += mutations(name, self.sources[name])
        counting = [mutation for mutation in found if mutation.key not in self.equivalent]
        return sample(counting, PER_GROUP, self.args.seed)

    def _asked(self, group: str, drawn: Sequence[Mutation]) -> list[Mutation]:
        parts = [name for name in self.args.only if name not in self.groups]
        if not self.args.only or group in self.args.only:
            return list(drawn)
        return [mutation for mutation in drawn if any(part in mutation.path for part in parts)]

    def _digests_of(self, key: str, test: str) -> tuple[str, str]:
        """Digest the functions of a mutation and of the test that killed it; with either a result lapses."""
        path, where, _ = key.split(":", 2)
        file, _, name = test.partition("::")
        by = self.place.root / file
        tested = (
            digest_part(by.read_bytes(), name.partition("[")[0].replace("::", ".")) if by.is_file() else ""
        )
        return digest_part(self.sources.get(path, b""), where), tested

    def test_files(self, group: str) -> list[str]:
        """Return the test files of a group, or those of them that were asked for."""
        patterns = self.groups[group]["tests"]
        paths = [path for pattern in patterns for path in sorted(self.place.root.glob(pattern))]
        files = dict.fromkeys(path.relative_to(self.place.root).as_posix() for path in paths)
        return [file for file in files if any(part in file for part in self.args.tests or [""])]

    def tests_of(self, group: str, mutation: Mutation) -> Tests:
        """Return the tests that touch a mutation, in the order in which they are tried, within the budget."""
        seconds, files = self.touches.seconds, self.test_files(group)
        own = self.groups[group].get("compiled", {}).get(mutation.path)
        tests = self.touches.of(mutation.path, mutation.where, mutation.line, self.sources[mutation.path])
        if own:  # nothing was written into it: all tests of these files
            tests = {test for test in seconds if test.partition("::")[0] in own}
        tests = {test for test in tests if test.partition("::")[0] in files}
        cost = {test: seconds[test] / (1 + 3 * self.kills[test]) for test in tests}
        total, ordered = 0.0, Tests()
        for test in sorted(tests, key=lambda test: (cost[test], test)):
            total += seconds[test]
            if ordered and total > self.args.budget:
                break
            ordered.append((test, seconds[test]))
        return ordered

    def _is_due(self, group: str, mutation: Mutation) -> bool:
        """Say whether nothing is known; survivors are tried again when a test has changed."""
        known = self.results.get(mutation.key)
        if known is None or known["status"] != "survived":
            return known is None
        return bool(known["tests_digest"] != self._tests_digest(self.tests_of(group, mutation)))

    def _tests_digest(self, tests: Tests) -> str:
        files = sorted({test.partition("::")[0] for test, _ in tests})
        return digest(b"".join((self.place.root / file).read_bytes() for file in files))

    def go(self) -> None:
        """Map what is not mapped, then judge what is not judged."""
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(self.args.jobs, context, initializer=judge.be_a_slot) as slots:
            for group in self.wanted:
                self.touches = Touches(self._map(slots, group), self.place.source)
                self._judge(slots, group)

    def _map(self, slots: ProcessPoolExecutor, group: str) -> Map:
        known = read_map(self.map_file)
        now = {file: digest((self.place.root / file).read_bytes()) for file in self.test_files(group)}
        due = [file for file in now if known.get(file, {}).get("file") != now[file]]
        futures = {slots.submit(judge.map_file, self.place, file, _MAP_LIMIT_S): file for file in due}
        for number, done in enumerate(as_completed(futures), start=1):
            file, (found, said) = futures[done], done.result()
            known[file] = {"file": now[file], **found}
            write_map(self.map_file, known)
            say(f"[{group} tests {number:2}/{len(due)}] {file}: {said}")
        return known

    def _judge(self, slots: ProcessPoolExecutor, group: str) -> None:
        due = [mutation for mutation in self.wanted[group] if self._is_due(group, mutation)]
        total, running = len(due), dict[Future[judge.Verdict], tuple[Mutation, Tests]]()
        while due or running:
            while due and len(running) < self.args.jobs:
                mutation = due.pop(0)
                tests = self.tests_of(group, mutation)
                mutant = mutation.apply(self.sources[mutation.path])
                future = slots.submit(judge.judge, self.place, mutation.path, mutant, tests)
                running[future] = mutation, tests
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                mutation, tests = running.pop(done)
                verdict = done.result()
                if verdict.status != "survived" or not self.args.tests:
                    self._keep(mutation, verdict, tests)
                say(f"[{group} {total - len(due) - len(running):2}/{total}] {line_of(mutation, verdict)}")

    def _keep(self, mutation: Mutation, verdict: judge.Verdict, tests: Tests) -> None:
        source, by = self._digests_of(mutation.key, verdict.test)
        result = {"source": source, "by": by, **vars(verdict)}
        if verdict.status == "survived":
            result["tests_digest"] = self._tests_digest(tests)
        self.results[mutation.key] = result
        self.kills[verdict.test] += bool(verdict.test)
        self.write()

    def write(self) -> None:
        """Write the record, whole or not. It imports the package: not before the slots are forked."""
        describe = importlib.import_module("shoal.bench.record").describe
        groups = {group: self.counts(group) for group in self.groups}
        figures = {
            "complete": all(counts["judged"] == counts["mutations"] for counts in groups.values()),
            "mark": MARK,
            "seed": self.args.seed,
            "equivalent": len(self.equivalent),
            "groups": groups,
            "results": dict(sorted(self.results.items())),
        }
        self.record.parent.mkdir(parents=True, exist_ok=True)
        partial = self.record.with_suffix(".tmp")
        partial.write_text(json.dumps({**describe("mutate"), **figures}, indent=2) + "\n")
        partial.replace(self.record)

    def counts(self, group: str) -> dict[str, Any]:
        """Count a group's mutations, also by module, and name what survived."""
        drawn = self.drawn[group]
        judged = [mutation for mutation in drawn if mutation.key in self.results]
        status = {mutation: self.results[mutation.key]["status"] for mutation in judged}
        killed = [mutation for mutation in judged if status[mutation] != "survived"]
        return {
            "mutations": len(drawn),
            "judged": len(judged),
            "killed": len(killed),
            "of_these_by_time_out": sum(one == "time-out" for one in status.values()),
            "share": round(len(killed) / len(judged), 3) if judged else None,
            "modules": {
                path: f"{sum(m.path == path for m in killed)} of {sum(m.path == path for m in judged)}"
                for path in sorted({m.path for m in judged})
            },
            "survivors": [f"{m.path}:{m.line} {m.key}" for m in judged if m not in killed],
        }


def line_of(mutation: Mutation, verdict: judge.Verdict) -> str:
    """Return one line about a mutation and what became of it."""
    by = f"  by {verdict.test}" if verdict.test else f"  {verdict.tests} tests"
    where = f"{mutation.path}:{mutation.line}"
    return f"{verdict.status:8} {verdict.seconds:5.1f} s  {where} {mutation.key.partition(':')[2]}{by}"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Do what the arguments say; return 1 where a group is below its mark, of what was judged."""
    parser = argparse.ArgumentParser("python -m tools.mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups, or parts of paths")
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="PART",
        help="parts of test files' paths; only what is killed is recorded",
    )
    parser.add_argument("--list", action="store_true", help="list the mutations, run nothing")
    parser.add_argument("--survivors", action="store_true", help="list what no test has noticed, run nothing")
    parser.add_argument("--seed", type=int, default=0, help="draw other mutations (default: 0)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="at a time")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tests for one (default: 120)")
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds before a test hangs, beside 5 x its usual"
    )
    parser.add_argument("--root", default=str(ROOT), help="the project, with src/ in it")
    args = parser.parse_args(argv)
    run = Run(args)
    if args.list:
        for group, wanted in run.wanted.items():
            for mutation in wanted:
                print(f"{group:10} {mutation.rule:10} {mutation.key} (line {mutation.line})")
        return 0
    if not args.survivors:
        judge.load(run.place)
        run.go()
        run.write()
    groups = {group: run.counts(group) for group in run.wanted}
    for group, found in groups.items():
        share = f"{found['killed']} killed of {found['judged']} judged, of {found['mutations']}"
        print("\n".join([f"{group}: {share}", *(f"  {survivor}" for survivor in found["survivors"])]))
    return int(any(found["judged"] and found["share"] < MARK for found in groups.values()))


if __name__ == "__main__":
    sys.exit(main())
