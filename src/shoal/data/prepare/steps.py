"""What the steps of a preparation share: folders, the form of the input, ranges that can be continued."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.data.prepare.engine import Engine, Job
from shoal.data.prepare.options import PrepareOptions
from shoal.data.prepare.plan import plan_ranges, range_size
from shoal.data.prepare.progress import RangeProgress
from shoal.data.prepare.sources import SourceFile, WorkRange
from shoal.runtime.files import read_json, write_json

REPORT = "report.html"


@dataclass(frozen=True)
class Paths:
    """Where one preparation works."""

    output: Path
    work: Path  # one folder for each set of inputs and options: pieces of two never meet

    @property
    def vocabulary_note(self) -> Path:
        return self.work / "vocabulary.json"

    @property
    def ranges(self) -> Path:
        return self.work / "ranges"

    @property
    def final(self) -> Path:
        return self.work / "final"


def form_of(options: PrepareOptions) -> dict[str, Any]:
    """Return how to read the files, as fields of a Format without its `cut`."""
    return {name: getattr(options, name) for name in ("text_key", "delim", "separator")}


def cut_ranges(
    options: PrepareOptions, sources: list[SourceFile], paths: Paths, *, cuttable: bool
) -> list[WorkRange]:
    """Cut the sources into ranges, of the size that an earlier run of this work used."""
    note = paths.work / "range_bytes.json"
    if not note.exists():
        write_json(note, options.range_bytes or range_size(sources))
    size = int(read_json(note, "work note"))
    return plan_ranges(sources, size, separator=options.separator, cuttable=cuttable)


@dataclass(frozen=True)
class Ranges:
    """The ranges of a step: what to do, how many bytes each is, and the file that says that it is done."""

    what: str
    items: Mapping[int, dict[str, Any]]
    num_bytes: Mapping[int, int]
    summaries: Mapping[int, Path]

    def run(self, engine: Engine, job: Job, console: Console) -> list[dict[str, Any]]:
        """Do the ranges that are not done yet; return the summaries of all, in order."""
        done = {n: read_json(path, "range summary") for n, path in self.summaries.items() if path.exists()}
        if done:
            console.print(f"continuing: {len(done)} of {len(self.items)} ranges were done before")
        before = sum(self.num_bytes[n] for n in done)
        pending = [item for n, item in self.items.items() if n not in done]
        with (
            RangeProgress(console, self.what, sum(self.num_bytes.values()), before) as progress,
            contextlib.closing(engine.run(job, pending)) as results,
        ):
            for result in results:
                if "index" in result:
                    done[result["index"]] = result
                    before += self.num_bytes[result["index"]]
                progress.show(before + result.get("partial_bytes", 0))
        return [done[n] for n in self.items]
