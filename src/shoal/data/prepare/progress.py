"""What a person sees while text is prepared: a bar on a terminal, plain lines elsewhere, then a table."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from shoal.errors import counted

LINE_EVERY_S = 5.0


class RangeProgress:
    """Shows bytes done, MB/s and time left; `done_bytes`, of an earlier run, do not count as speed."""

    def __init__(self, console: Console, what: str, total_bytes: int, done_bytes: int) -> None:
        self._console, self._what, self._total = console, what, max(total_bytes, 1)
        self._first, self._done = done_bytes, done_bytes
        self._start = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(what, total=self._total, completed=done_bytes, speed="")

    def __enter__(self) -> RangeProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, done_bytes: int) -> None:
        """Show how many bytes are done."""
        finished = self._done < self._total <= done_bytes
        self._done = max(self._done, done_bytes)
        self._bar.update(self._task, completed=self._done, speed=self.speed())
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._last_line > LINE_EVERY_S or finished):
            self._last_line = now
            self._console.print(
                f"{self._what} {self._done / self._total:4.0%}  {self.speed()}", highlight=False
            )

    def speed(self) -> str:
        """Return what stands beside the bar: "12.3 MB/s, 45 s left"."""
        rate = (self._done - self._first) / max(time.monotonic() - self._start, 1e-3)
        if not rate:
            return "starting"
        return f"{rate / 1e6:.1f} MB/s, {duration((self._total - self._done) / rate)} left"


def duration(seconds: float) -> str:
    """Return a time span as people say it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = int(seconds / 60 + 0.5)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def summary_table(manifest: dict[str, Any], output: str, seconds: float) -> Table:
    """Return the table that ends a preparation."""
    counters, tokenizer = manifest["counters"], manifest["tokenizer"]
    table = Table(title=f"dataset {output}", show_header=False, title_justify="left")
    rate = counters["bytes_read"] / 1e6 / max(seconds, 1e-3)
    table.add_row("read", f"{counters['bytes_read'] / 1e6:,.1f} MB in {duration(seconds)} ({rate:.1f} MB/s)")
    table.add_row("documents", f"{counters['documents_kept']:,} of {counters['documents_read']:,}")
    dropped = ", ".join(
        f"{name} {counters[name]:,}" for name in ("rejected", "empty", "filtered", "duplicates")
    )
    table.add_row("left out", dropped)
    table.add_row("tokens", f"{counters['tokens']:,} as {manifest['dtype']}")
    for name, facts in manifest["splits"].items():
        table.add_row(f"  {name}", f"{facts['tokens']:,} tokens, {counted(facts['documents'], 'document')}")
    table.add_row("split by", manifest["split"]["by"])
    table.add_row(
        "vocabulary",
        f"{manifest['vocab_size']:,} ids ({tokenizer['kind']}), end of document {manifest['eod_id']}",
    )
    if counters["rejected"]:
        table.add_row("refused lines", f"{output}/rejects/rejects.jsonl")
    return table
