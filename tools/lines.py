"""Print the lines of code of each room against its budget; a room over it fails. `make check` calls this.

A line counts if it holds code: blank lines, comments and docstrings do not, so that nobody saves on them.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "shoal"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@dataclass(frozen=True)
class Room:
    """Folders and modules that share a budget of lines of code."""

    name: str
    paths: Sequence[str]  # below the base of the rooms
    budget: int
    but: tuple[str, ...] = ()  # rooms of their own among these paths


CORE = "errors config runtime models tasks parallel gradsync checkpoint train launch"
STAGES = ("data/prepare/stages", "data/prepare/dedup", "data/prepare/web")
ROOMS = (
    Room("core", CORE.split(), 7_850),
    Room("strategies", ["strategies"], 2_000),
    Room("comm", ["comm"], 600),
    Room("diagnosis", ["diagnosis"], 500),
    Room("networks", ["networks"], 710),
    Room("interop", ["interop"], 950),
    Room("data", ["data", "scoring"], 1_800, but=("data/prepare",)),
    Room("prepare", ["data/prepare"], 3_700, but=STAGES),
    Room("stages", STAGES[:2], 1_700),
    Room("web", STAGES[2:], 1_300),
    Room("page", ["page"], 120),
    Room("infer", ["infer"], 2_000),
    Room("plan", ["plan"], 3_630),
    Room("checks", ["doctor", "parity", "quickstart", "worker_pool"], 2_300),
    Room("bench", ["bench"], 3_600, but=("bench/frameworks",)),
    Room("frameworks", ["bench/frameworks"], 1_150),
    Room("cli", ["cli", "notebook", "__init__", "__main__"], 1_290),
)
WHOLE = Room("whole", ["."], 33_890)
BESIDE = (
    Room("benchmarks", ["benchmarks"], 3_850),
    Room("tools", ["tools"], 1_840),
    Room("tests", ["tests"], 30_800),
)


def code_lines(source: str) -> int:
    """Count the lines of a module that hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE and token.string:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def modules_of(room: Room, base: Path) -> set[Path]:
    """Return the modules of a room, whose folders and modules are in `base`."""
    found: set[Path] = set()
    for name in room.paths:
        folder = base / name
        found |= set(folder.rglob("*.py")) if folder.is_dir() else {folder.with_suffix(".py")}
    return {path for path in found if not any(path.is_relative_to(base / other) for other in room.but)}


def report(room: Room, base: Path) -> bool:
    """Print a room's line; say whether it is within its budget."""
    lines = sum(code_lines(path.read_text()) for path in modules_of(room, base))
    print(f"{room.name:10} {lines:6,} of {room.budget:6,}{'  OVER BUDGET' * (lines > room.budget)}")
    return lines <= room.budget


def homeless(base: Path) -> list[str]:
    """Return the modules with code that are in no room."""
    owned = {path for room in ROOMS for path in modules_of(room, base)}
    return sorted(str(path) for path in modules_of(WHOLE, base) - owned if code_lines(path.read_text()))


def main() -> int:
    """Print a line a room; return 1 if one is over its budget, or a module is in none."""
    kept = [report(room, SOURCE) for room in (*ROOMS, WHOLE)] + [report(room, ROOT) for room in BESIDE]
    if lost := homeless(SOURCE):
        print(f"in no room: {', '.join(lost)}")
    return int(bool(lost) or not all(kept))


if __name__ == "__main__":
    sys.exit(main())
