"""Which tests touch which blocks of code, in whatever process: a copy has `hit(n)` in every block.

A block's first call in a test is one record of 8 bytes in a log: the number of the test that runs (in a
memory map that all processes read), and that of the block. So nothing is lost where a process is killed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import mmap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

Map = dict[str, dict[str, Any]]  # by test file: its digest, the package's, names of blocks, tests
# torch.compile traces these: no calls may be written into them.
COMPILED = ("shoal/models/", "shoal/parallel/tensor.py")
_RECORDER = """
import mmap
import os
_seen = set()
_log = os.open(os.path.join(os.path.dirname(__file__), "touched"), os.O_WRONLY | os.O_APPEND)
with open(os.path.join(os.path.dirname(__file__), "now"), "rb") as _file:
    _now = mmap.mmap(_file.fileno(), 4, prot=mmap.PROT_READ)
def hit(n):
    test = _now[:4]
    if (test, n) not in _seen:
        _seen.add((test, n))
        os.write(_log, test + n.to_bytes(4, "little"))
"""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def blocks(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Return name and statements of every block of a function: its body, branches, loops."""
    count: Counter[str] = Counter()

    def visit(body: list[ast.stmt], where: str, named: bool) -> Iterator[tuple[str, list[ast.stmt]]]:
        if where and named:
            yield f"{where}#{count[where]}", body
            count[where] += 1
        for node in list(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{where}.{node.name}" if where else node.name
                yield from visit(node.body, name, not isinstance(node, ast.ClassDef))
                continue
            inner = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
            inner += [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]
            for part in filter(None, inner):
                yield from visit(part, where, not isinstance(node, ast.With | ast.AsyncWith))

    yield from visit(tree.body, "", False)


def block_at(tree: ast.Module, line: int) -> str:
    """Return the innermost block of a line, or "" outside of functions."""
    found = [
        ((body[-1].end_lineno or 0) - body[0].lineno, name)
        for name, body in blocks(tree)
        if body[0].lineno <= line <= (body[-1].end_lineno or 0)
    ]
    return min(found)[1] if found else ""


def instrument(overlay: Path) -> list[str]:
    """Write a call into every block of a copied package; return the blocks' names by number."""
    names: list[str] = []
    for path in sorted(overlay.rglob("*.py")):
        below = path.relative_to(overlay).as_posix()
        if below.startswith(COMPILED):
            continue
        tree = ast.parse(path.read_bytes())
        for name, body in list(blocks(tree)):
            is_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            call = ast.parse(f"__import__('_touched').hit({len(names)})").body[0]
            body.insert(int(is_docstring and name.endswith("#0")), call)
            names.append(f"{below}:{name}")
        path.write_text(ast.unparse(tree))
    (overlay / "_touched.py").write_text(_RECORDER)
    (overlay / "touched").touch()
    (overlay / "now").write_bytes(bytes(4))
    return names


class Watch:
    """A pytest plugin: what ran, how it ended, how long it took; with an overlay, which test runs now.

    Without one it has the tests run in the order given, less those that are not there on this machine.
    """

    def __init__(self, tests: Sequence[str], overlay: Path | None = None) -> None:
        self._tests = tests
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self._overlay, self._number = overlay, 0

    def _tell(self, number: int) -> None:
        if self._overlay:
            with (self._overlay / "now").open("r+b") as file, mmap.mmap(file.fileno(), 4) as now:
                now[:] = number.to_bytes(4, "little")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if not self._overlay:
            found = {item.nodeid: item for item in items}
            items[:] = [found[test] for test in self._tests if test in found]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self._number = len(self.seconds) + 1
        self.seconds[item.nodeid] = 0.0
        self._tell(self._number)
        result = yield
        self._tell(0)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What several tests share is touched by all of them: number 0."""
        shared = fixturedef.scope != "function"
        if shared:
            self._tell(0)
        try:
            return (yield)
        finally:
            if shared:
                self._tell(self._number)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.setdefault(report.nodeid, str(report.longrepr)[-2000:])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, str(report.longrepr)[-2000:])


def found(overlay: Path, names: list[str], watch: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return seconds and blocks of each test that passed, blocks of shared fixtures with every test."""
    log = (overlay / "touched").read_bytes()
    by_number: dict[int, set[int]] = defaultdict(set)
    for place in range(0, len(log) - 7, 8):
        test, block = (int.from_bytes(log[place + at : place + at + 4], "little") for at in (0, 4))
        by_number[test].add(block)
    used = sorted(set().union(*by_number.values()))
    index = {block: number for number, block in enumerate(used)}
    tests = {
        test: [round(seconds, 2), sorted(index[block] for block in by_number[number] | by_number[0])]
        for number, (test, seconds) in enumerate(watch["seconds"].items(), start=1)
        if test not in watch["failed"]  # it would say nothing about a mutation
    }
    return {"sources": _digests(source), "names": [names[block] for block in used], "tests": tests}


def nothing() -> dict[str, Any]:
    return {"sources": {}, "names": [], "tests": {}}


def _digests(source: Path) -> dict[str, str]:
    return {path.relative_to(source).as_posix(): digest(path.read_bytes()) for path in source.rglob("*.py")}


def read_map(path: Path) -> Map:
    if not path.exists():
        return {}
    known: Map = json.loads(lzma.decompress(path.read_bytes()))
    return known


def write_map(path: Path, known: Map) -> None:
    """Write it in one piece, compressed: it is kept in the repository."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(sorted(known.items())), separators=(",", ":"))
    path.with_suffix(".tmp").write_bytes(lzma.compress(text.encode()))
    path.with_suffix(".tmp").replace(path)


class Touches:
    """What is known of all test files."""

    def __init__(self, known: Map, source: Path) -> None:
        self.seconds: dict[str, float] = {}
        self._tests: dict[str, set[str]] = defaultdict(set)  # by block, by function, by module
        self._moved: set[str] = set()  # modules that have changed since: their blocks may count differently
        now = _digests(source)
        for file in known.values():
            self._moved |= {name for name, seen in file["sources"].items() if now.get(name) != seen}
            for test, (self.seconds[test], touched) in file["tests"].items():
                for name in map(file["names"].__getitem__, touched):
                    module, _, block = name.partition(":")
                    for key in (name, f"{module}:{block.partition('#')[0]}", f"{module}:"):
                        self._tests[key].add(test)

    def of(self, path: str, where: str, line: int, source: bytes) -> set[str]:
        """Return the tests of a place: of its block, or of what uses its name where it is in no function."""
        tree = ast.parse(source)
        block = block_at(tree, line)
        if block and path not in self._moved:
            return self._tests.get(f"{path}:{block}", set())
        module = self._tests.get(f"{path}:", set())
        if block:
            return self._tests.get(f"{path}:{where}", module)
        defined = {
            part.id
            for node in tree.body
            if node.lineno <= line <= (node.end_lineno or 0)
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
        users = {
            f"{path}:{name.partition('#')[0]}"
            for name, body in blocks(tree)
            if any(isinstance(p, ast.Name) and p.id in defined for s in body for p in ast.walk(s))
        }
        return set().union(*(self._tests.get(user, set()) for user in users)) or module
