"""Tests run in a copy of the package, by a process forked from one that has loaded what they import.

The copy comes first on PYTHONPATH, so that workers and commands which tests start see it, too. Whatever a run
leaves behind is a descendant of the process that forked it, and is killed at its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mutate import touched

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_SURE_S = 5.0  # a test that took longer has to fail twice: it may depend on how busy the machine is


@dataclass(frozen=True)
class Place:
    """Where a project's package and tests are."""

    root: Path
    package: str
    patience_s: float  # what a test gets beside five times its usual seconds, before it counts as hanging

    @property
    def source(self) -> Path:
        return self.root / "src"


@dataclass(frozen=True)
class Verdict:
    status: str  # killed, time-out, survived
    test: str  # by which
    seconds: float
    tests: int  # that ran


def load(place: Place) -> None:
    """Import what the package imports, and pytest, but nothing of the package: this process is forked."""
    program = (
        "import importlib, pkgutil, sys, contextlib\n"
        f"import {place.package}\n"
        f"for module in pkgutil.walk_packages({place.package}.__path__, '{place.package}.'):\n"
        "    if '__main__' in module.name: continue\n"
        "    with contextlib.suppress(Exception): importlib.import_module(module.name)\n"
        f"print(*[n for n in sys.modules if n.partition('.')[0] not in ('{place.package}', '__main__')])"
    )
    environment = os.environ | {"PYTHONPATH": str(place.source)}
    listed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    gc.disable()
    for name in ("pytest", *listed.stdout.split()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    assert place.package not in sys.modules
    gc.freeze()
    gc.enable()


def be_a_slot() -> None:
    """Adopt what tests leave behind, and die with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def copied(place: Place) -> Iterator[Path]:
    """Copy the package, and remove it with what tests wrote."""
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        shutil.copytree(place.source / place.package, Path(folder) / place.package)
        yield Path(folder)


def map_file(place: Place, test_file: str, limit_s: float) -> tuple[dict[str, Any], str]:
    """Return which tests of a file touch which blocks, and how it went."""
    with copied(place) as overlay:
        names = touched.instrument(overlay)
        watch = run_tests(place, overlay, [test_file], limit_s, "map")
        if watch is None:
            return touched.nothing(), f"no end within {limit_s:.0f} s: not used"
        found = touched.found(overlay, names, watch, place.source)
    return found, f"{len(watch['seconds'])} tests, {len(watch['failed'])} failed"


def judge(place: Place, path: str, mutant: bytes, tests: Sequence[tuple[str, float]]) -> Verdict:
    """Run tests (each with its usual seconds) against a mutant until one fails."""
    began, left = time.monotonic(), [test for test, _ in tests]
    usual = dict(tests)
    with copied(place) as overlay:
        (overlay / path).write_bytes(mutant)
        for old in (overlay / path).parent.glob(f"__pycache__/{Path(path).stem}.*"):
            old.unlink()
        while left:
            limit = 2 * place.patience_s + 5 * sum(usual[test] for test in left)
            each = place.patience_s + 5 * max(usual[test] for test in left)
            watch = run_tests(place, overlay, left, limit, "judge", "-x", f"--timeout={each:.0f}")
            seconds = time.monotonic() - began
            if watch is None:
                return Verdict("time-out", "", seconds, len(left))
            if not watch["failed"]:
                return Verdict("survived", "", seconds, len(tests))
            test, why = next(iter(watch["failed"].items()))
            if test not in usual:  # a file that cannot be imported
                return Verdict("killed", test, seconds, 1)
            if watch["seconds"].get(test, 0.0) > _SURE_S:
                again = run_tests(place, overlay, [test], limit, "judge", f"--timeout={each:.0f}")
                if again is not None and not again["failed"]:
                    left = left[left.index(test) + 1 :]
                    continue
            status = "time-out" if "Timeout (>" in why else "killed"
            return Verdict(status, test, seconds, len(watch["seconds"]))
    return Verdict("survived", "", time.monotonic() - began, len(tests))


def run_tests(
    place: Place, overlay: Path, tests: Sequence[str], limit_s: float, mode: str, *options: str
) -> dict[str, Any] | None:
    """Run pytest in a child; return what its Watch saw, or None where it was killed at its limit."""
    result = overlay / "result.json"
    result.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _be_pytest(place, overlay, tests, result, mode, options)
    limit = time.monotonic() + limit_s
    while not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < limit:
        time.sleep(0.05)
    late = time.monotonic() >= limit and not result.exists()
    end_all_below()
    if late:
        return None
    if not result.exists():  # it took pytest down with it
        return {"seconds": dict.fromkeys(tests, 0.0), "failed": {tests[0]: "it died"}}
    seen: dict[str, Any] = json.loads(result.read_text())
    return seen


def _be_pytest(
    place: Place, overlay: Path, tests: Sequence[str], result: Path, mode: str, options: Sequence[str]
) -> None:
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        screen = os.open(overlay / "screen.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(screen, 1)
        os.dup2(screen, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(place.root)
        sys.path.insert(0, str(overlay))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(overlay), os.environ.get("PYTHONPATH", "")])
        )
        importlib.invalidate_caches()
        pytest = importlib.import_module("pytest")
        watch = touched.Watch(tests, overlay if mode == "map" else None)
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not proof", "--color=no"]
        status = pytest.main([*words, f"--basetemp={overlay / 'tmp'}", *options, *files], plugins=[watch])
        if status in (2, 3) and not watch.failed:  # interrupted, or an internal error
            watch.failed[tests[0]] = f"pytest ended with status {status}"
        result.with_suffix(".tmp").write_text(json.dumps({"seconds": watch.seconds, "failed": watch.failed}))
        result.with_suffix(".tmp").replace(result)
    finally:
        os._exit(0)


def end_all_below() -> None:
    """Kill all descendants of this process, also those that lost their parents, and wait for them."""
    for _ in range(200):
        below = _descendants(os.getpid())
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not below:
            return
        time.sleep(0.02)


def _descendants(pid: int) -> list[int]:
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *_descendants(child)]
    return found
