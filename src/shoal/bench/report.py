"""`shoal bench report`: one page, or a CSV file, from records of `shoal bench`."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.bench.read_records import CeilingsRecord, NetworksRecord, Record, load
from shoal.bench.sections import SECTIONS, answer, shares
from shoal.errors import InputError
from shoal.page.render import Block, render
from shoal.runtime.files import check_targets, write_text

_MOST_RECORDS = 20
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes a text that begins so


def command(paths: Sequence[Path], output: Path | None, table: Path | None) -> int:
    """Write the page, the CSV file, or both."""
    if not (output or table) or not 0 < len(paths) <= _MOST_RECORDS:
        raise InputError(
            f"{len(paths)} records, --output {output}, --csv {table}",
            hint=f"name 1 to {_MOST_RECORDS} records, and --output report.html, --csv rows.csv, or both",
        )
    check_targets(output, table)
    records = [load(path) for path in paths]
    if output:
        write_text(output, page(records))
    if table:
        write_text(table, as_csv(records))
    for file in filter(None, (output, table)):
        Console().print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)
    return 0


def best_here(records: Sequence[Record]) -> str:
    """Return the one-line answer of all records of networks; empty without any."""
    return answer([row for record in records if isinstance(record, NetworksRecord) for row in record.rows])


def page(records: Sequence[Record], notes: Sequence[str] = ()) -> str:
    """Return the page: the answer, notes, and a section for each record, with nothing from elsewhere."""
    machine = next((record for record in records if isinstance(record, CeilingsRecord)), None)

    def blocks(record: Record) -> Iterator[Block]:
        yield from SECTIONS[record.kind](record)
        if machine and isinstance(record, NetworksRecord):
            yield from shares(record, machine)

    sections = [
        {
            "title": record.name,
            "file": record.path.name,
            "facts": facts(record),
            "runs": [list(run) for _, run in itertools.groupby(blocks(record), type)],
        }
        for record in records
    ]
    return render(
        Path(__file__).with_name("report.html"), answer=best_here(records), notes=notes, sections=sections
    )


def facts(record: Record) -> dict[str, str]:
    """Return date, commit, machine, load and versions in words."""
    versions = dict(record.versions)
    for row in record.timed:
        versions |= getattr(row, "versions", {})
    changed = "" if record.clean is not False else ", with changes"
    loads = (f"{when} {values[0]:.2f}" for when, values in record.load.items() if values)
    words = {
        "date": record.date,
        "commit": f"{record.commit[:12]}{changed}" if record.commit else "",
        "machine": _listed(record.machine),
        "load": ", ".join(loads),
        "versions": _listed(versions),
        "settings": _listed(record.options | record.asked),
    }
    return {name: text[:600] for name, text in words.items() if text}


def _listed(values: dict[str, Any]) -> str:
    words = {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in values.items()
    }
    return ", ".join(
        f"{name.replace('_', ' ')} {' '.join(text.split())[:80]}" for name, text in words.items()
    )


def as_csv(records: Sequence[Record]) -> str:
    """Return a line for each row of all records; of lists only those of seconds appear, as quantiles."""
    lines = [line for record in records for line in _csv_lines(record)]
    file = io.StringIO()
    names = dict.fromkeys(name for line in lines for name in line)
    writer = csv.DictWriter(file, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _safe(value) for name, value in line.items()} for line in lines)
    return file.getvalue()


def _csv_lines(record: Record) -> Iterator[dict[str, Any]]:
    raw = record.raw["rows" if "rows" in record.raw else "cells"]
    timed = record.timed or [None] * len(raw)
    for row, told in zip(timed, raw, strict=True):
        line: dict[str, Any] = {"record": record.path.name, "kind": record.kind, "date": record.date}
        for name, value in told.items():
            inner = value.items() if isinstance(value, dict) else [(None, value)]
            line |= {
                f"{name}.{key}" if key else name: one
                for key, one in inner
                if not isinstance(one, list | dict)
            }
        if row is not None and row.status == "done":
            spread = row.spread
            line |= {
                "median_s": spread.median,
                "p5_s": spread.low,
                "p95_s": spread.high,
                "num_samples": len(row.times),
            }
        yield line


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
