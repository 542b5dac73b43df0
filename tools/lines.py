"""Print the lines of code of the core and of the whole, against their budgets; `make check` calls this.

A line counts if it holds code: blank lines, comments and docstrings do not, so that nobody saves on them.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "shoal"
CORE = ("config", "runtime", "models", "tasks", "parallel", "gradsync", "comm", "checkpoint", "train")
CORE_BUDGET, WHOLE_BUDGET = 6_500, 15_000
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


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


def count(folder: Path) -> tuple[int, int]:
    """Count the lines of code, and all lines, of every module below `folder`."""
    sources = [path.read_text() for path in folder.rglob("*.py")]
    return sum(map(code_lines, sources)), sum(len(source.splitlines()) for source in sources)


def main() -> None:
    """Print one line a room of the core, then both sums."""
    rooms = {room: count(SOURCE / room) for room in CORE}
    print("core:", ", ".join(f"{room} {code}" for room, (code, _) in rooms.items()))
    core = tuple(map(sum, zip(*rooms.values(), strict=True)))
    for name, (code, lines), budget in (
        ("core", core, CORE_BUDGET),
        ("whole", count(SOURCE), WHOLE_BUDGET),
    ):
        over = "  OVER BUDGET" if code > budget else ""
        print(
            f"{name}: {code:,} lines of code of {budget:,}{over} ({lines:,} with docstrings and blank ones)"
        )


if __name__ == "__main__":
    main()
