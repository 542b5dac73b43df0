"""`shoal prepare --show-stages`: the stages of a chain, their settings, and what each one dropped."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.data.dataset import open_dataset
from shoal.data.prepare.chain import read_chain
from shoal.errors import counted


def show_stages(stages: Path | None, changes: Mapping[str, Mapping[str, Any]], output: Path | None) -> None:
    """Print a chain as a commented TOML; with a finished dataset, a table of what its stages dropped."""
    if output is not None:
        return _print_funnel(output)
    chain = read_chain(stages, changes)
    lines = [f"# {stages or 'The chain of --web'}: its stages, in the order in which they run."]
    for name, settings in chain.stages.items():
        lines += ["", *_comment(inspect.getdoc(type(settings)) or ""), f"[{name}]"]
        for field, about in type(settings).model_fields.items():
            value = json.dumps(settings.model_dump(mode="json")[field], ensure_ascii=False)
            shown = "# " if getattr(settings, field) == about.default else ""
            lines += [*_comment(about.description or ""), f"{shown}{field} = {value}"]
    print("\n".join(lines))
    return None


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in text.splitlines()]


def _print_funnel(path: Path) -> None:
    """Print what each stage of a finished dataset got and dropped."""
    manifest = open_dataset(path).manifest
    table = Table(title=f"stages of {path}", title_justify="left")
    for heading in ("stage", "documents", "dropped", "mostly because of"):
        table.add_column(heading, justify="left" if heading in ("stage", "mostly because of") else "right")
    for record in manifest.get("lineage", []):
        counters = record.get("counters", {})
        if "dropped" not in counters:
            continue
        reasons = sorted(counters["reasons"].items(), key=lambda item: (-item[1], item[0]))
        why = ", ".join(f"{reason} {number:,}" for reason, number in reasons[:3])
        table.add_row(record["stage"], f"{counters['documents']:,}", f"{counters['dropped']:,}", why)
    kept = counted(manifest["counters"]["documents_kept"], "document")
    Console().print(table if table.row_count else f"{path} was prepared without stages", f"kept: {kept}")
