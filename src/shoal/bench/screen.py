"""Tables of the benchmarks on the screen."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def make_table(
    left: Sequence[str], right: Sequence[str], notes: Sequence[str] = (), title: str = ""
) -> Table:
    """Return a table without rows: columns of words, columns of numbers, and notes below."""
    caption = escape("\n".join(notes)) or None
    table = Table(
        *left, title=title, caption=caption, caption_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def show(table: Table) -> None:
    """Print a table, also where there is no terminal."""
    Console(width=None if sys.stdout.isatty() else 110).print(table)
