"""Print the lines of source of the core and of the whole, against their budgets; `make check` calls this."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "shoal"
CORE = ("config", "runtime", "models", "tasks", "parallel", "gradsync", "comm", "checkpoint", "train")
CORE_BUDGET, WHOLE_BUDGET = 6_500, 15_000


def num_lines(folder: Path) -> int:
    """Count the lines of every module below `folder`."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def main() -> None:
    """Print one line a room of the core, then both sums."""
    rooms = {room: num_lines(SOURCE / room) for room in CORE}
    print("core:", ", ".join(f"{room} {count}" for room, count in rooms.items()))
    for name, count, budget in (
        ("core", sum(rooms.values()), CORE_BUDGET),
        ("whole", num_lines(SOURCE), WHOLE_BUDGET),
    ):
        print(f"{name}: {count:,} lines of {budget:,}{'  OVER BUDGET' if count > budget else ''}")


if __name__ == "__main__":
    main()
