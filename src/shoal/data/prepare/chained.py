"""A preparation by a chain of stages: fetch, pass 1, duplicates, pass 2, and what became of each document."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from shoal.data.dataset import PAGES_DIR, SPLITS
from shoal.data.permutation import permute
from shoal.data.prepare.chain import Chain, stage_class
from shoal.data.prepare.decisions import DECISIONS, DUPLICATE, TABLE, DecisionsWriter
from shoal.data.prepare.dedup.find import find_duplicates
from shoal.data.prepare.dedup.ranges import file_batches
from shoal.data.prepare.dedup.settings import DedupSettings
from shoal.data.prepare.engine import Engine, Job
from shoal.data.prepare.lineage import shown
from shoal.data.prepare.options import PrepareOptions
from shoal.data.prepare.parse import Format
from shoal.data.prepare.passes import Duplicates, SortedRows, TextFiles, fates_path
from shoal.data.prepare.plan import limit_ranges
from shoal.data.prepare.progress import LINE_EVERY_S
from shoal.data.prepare.read import PAGES, READ, count_documents
from shoal.data.prepare.report import write_report
from shoal.data.prepare.samples import Samples
from shoal.data.prepare.sources import SourceFile
from shoal.data.prepare.splits import SplitPlan, shuffled_place
from shoal.data.prepare.stages.decontaminate import Decontaminate
from shoal.data.prepare.steps import Paths, Ranges, cut_ranges, form_of
from shoal.data.prepare.vocabulary import SAMPLE_BYTES
from shoal.data.prepare.web.client import Fetch
from shoal.data.prepare.web.fetch import Progress, fetch_all
from shoal.data.prepare.web.links import Links, read_links
from shoal.data.prepare.web.urls import Urls, filter_urls
from shoal.data.prepare.work import pack_range, range_paths
from shoal.errors import DataError, ShoalError, counted
from shoal.runtime.files import read_json, write_json

SAMPLES = "samples.json"
_WORKERS = "shoal.data.prepare.passes"
_BLOCK = 512  # documents of which a sample takes its texts together
_NAMED = 3  # inputs, in the title of the report
_MANY = 0.9  # share of documents from which on a stage that drops them is reported
Record = dict[str, Any]  # of a stage: its name, settings and counters


@dataclass
class Chained:
    """One preparation by a chain."""

    chain: Chain
    options: PrepareOptions
    sources: list[SourceFile]
    paths: Paths
    engine: Engine
    console: Console
    summaries: list[dict[str, Any]] = field(default_factory=list)  # of pass 1
    fetched: dict[str, dict[str, Any]] = field(default_factory=dict)  # counters of links, urls and fetch

    @property
    def texts(self) -> Path:
        """Return the folder of what pass 1 makes."""
        return self.paths.work / "texts"

    @cached_property
    def starts(self) -> list[int]:
        """Return the number of the first document of each range, and that of all documents."""
        return list(accumulate((sum(summary["batches"]) for summary in self.summaries), initial=0))

    @cached_property
    def duplicates(self) -> SortedRows:
        return Duplicates(self._found).rows

    @property
    def _found(self) -> str | None:
        """Return the folder of what find_duplicates found."""
        note = self.paths.work / "duplicates.json"
        return str(self.paths.work.absolute() / read_json(note, "work note")) if note.exists() else None

    @property
    def _times(self) -> Path:
        return self.paths.work / "times.json"

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Note how many seconds a step takes, over all runs."""
        began = time.monotonic()
        try:
            yield
        finally:
            known = read_json(self._times, "work note") if self._times.exists() else {}
            seconds = known.get(name, 0.0) + time.monotonic() - began
            write_json(self._times, {**known, name: round(seconds, 1)})

    def fetch(self) -> None:
        """Fetch the pages of the lists of URLs; they are sources like any others."""
        if not self.options.urls:
            return
        links, urls = Counter[str](), Counter[str]()
        found = read_links(list(map(Path, self.options.urls)), self.chain.or_default(Links), links)
        kept = filter_urls(found, self.chain.or_default(Urls), urls)
        with self.timed("fetch"), self.console.status("fetching") as status:
            last = time.monotonic()

            def tell(progress: Progress) -> None:
                nonlocal last
                status.update(f"fetching: {progress}")
                if not self.console.is_terminal and time.monotonic() - last > LINE_EVERY_S:
                    last = time.monotonic()
                    self.console.print(f"fetching: {progress}", highlight=False)

            got = fetch_all(kept, self.paths.output / PAGES_DIR, self.chain.or_default(Fetch), tell)
        counted_by = {"links": (links, "links"), "urls": (urls, "kept"), "fetch": (got.counters, "ok")}
        self.fetched = {name: _before(dict(found), kept) for name, (found, kept) in counted_by.items()}
        first = sum(source.role == "main" for source in self.sources)  # those of other splits come last
        for place, path in enumerate(got.warcs, start=first):
            facts = path.stat()
            found_page = SourceFile(str(path.absolute()), "main", "warc.gz", facts.st_size, facts.st_mtime_ns)
            self.sources.insert(place, found_page)

    def read(self) -> None:
        """Run pass 1."""
        self.texts.mkdir(exist_ok=True)
        ranges = cut_ranges(self.options, self.sources, self.paths, cuttable=False)
        if self.options.limit is not None:
            form = Format(**form_of(self.options), cut=None)
            ranges = limit_ranges(
                ranges, dict(enumerate(self.sources)), form, self.options.limit, count_documents
            )
        spec = {"folder": str(self.texts.absolute()), "form": form_of(self.options)}
        spec["chain"] = self.chain.to_dict()
        with self.timed("read"):
            self.summaries = Ranges(
                "read",
                {work.index: pack_range(work, self.sources) for work in ranges},
                {work.index: work.num_bytes for work in ranges},
                {work.index: TextFiles(self.texts, work.index).summary for work in ranges},
            ).run(self.engine, Job(f"{_WORKERS}:TextWorker", spec), self.console)

    def find_duplicates(self) -> None:
        """Find what pass 2 drops with all documents in view."""
        settings = self.chain.get(DedupSettings)
        note = self.paths.work / "duplicates.json"
        if settings is None or note.exists():
            return
        ranges = [TextFiles(self.texts, summary["index"]).arrow for summary in self.summaries]
        folder = self.paths.work / "dedup"
        folder.mkdir(exist_ok=True)

        def run_jobs(job: str, spec: dict[str, Any], items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            for result in self.engine.run(Job(job, spec), items):
                if "partial_bytes" not in result:
                    yield result

        with self.timed("dedup"):
            found = find_duplicates(
                folder.absolute(), ranges, settings, run_jobs, self.options.memory_bytes, self._say
            )
        write_json(note, str(found.parent.relative_to(self.paths.work.absolute())))

    def _say(self, words: str) -> None:
        self.console.print(f"duplicates: {words}", highlight=False)

    def tokenise(self, tokenizer: Path) -> list[dict[str, Any]]:
        """Run pass 2; return the summaries."""
        cleaner = self.chain.get(Decontaminate)
        spec = {
            "texts": str(self.texts.absolute()),
            "tokens": str(self.paths.ranges.absolute()),
            "tokenizer": str(tokenizer.absolute()),
            "duplicates": self._found,
            "decontaminate": cleaner.model_dump(mode="json") if cleaner else None,
            "common": self._common(cleaner) if cleaner else [],
        }
        indexes = [summary["index"] for summary in self.summaries]
        items = {
            summary["index"]: {name: summary[name] for name in ("index", "role", "bytes", "lines")}
            | {"first": self.starts[place]}
            for place, summary in enumerate(self.summaries)
        }
        with self.timed("tokenise"):
            return Ranges(
                "tokenise",
                items,
                {summary["index"]: summary["bytes"] for summary in self.summaries},
                {index: range_paths(self.paths.ranges, index)[1] for index in indexes},
            ).run(self.engine, Job(f"{_WORKERS}:TokenWorker", spec), self.console)

    def _common(self, cleaner: Decontaminate) -> list[str]:
        """Return the n-grams of the evaluation files that are common in the text."""
        note = self.paths.work / "common.json"
        if not note.exists():
            total = Counter[str]()
            spec = {
                "texts": str(self.texts.absolute()),
                "duplicates": self._found,
                "decontaminate": cleaner.model_dump(mode="json"),
            }
            items = [{"index": s["index"], "first": self.starts[n]} for n, s in enumerate(self.summaries)]
            for result in self.engine.run(Job(f"{_WORKERS}:CountWorker", spec), items):
                total.update(result.get("counts", {}))
            write_json(note, cleaner.common(total))
        found: list[str] = read_json(note, "work note")
        return found

    # --- the text that a tokenizer is trained on ---

    def num_bytes(self) -> int:
        """Return the size of the main text; exactly where it is smaller than a sample."""
        exact = sum(len(text.encode()) for texts in self.sample(SAMPLE_BYTES) for text in texts)
        read = sum(summary["text_bytes"] for summary in self.summaries if summary["role"] == "main")
        return exact if exact < SAMPLE_BYTES else max(exact, read)

    def sample(self, budget: int) -> Iterator[list[str]]:
        """Yield texts that are kept, about `budget` bytes in all, from places spread by the seed."""
        ends = [self.starts[n + 1] for n, summary in enumerate(self.summaries) if summary["role"] == "main"]
        last = max(ends, default=0)
        blocks = -(-last // _BLOCK)
        order = np.argsort(permute(np.arange(blocks, dtype=np.int64), blocks, self.options.seed, "sample"))
        taken = 0
        for block in order.tolist():
            for text in self._texts_between(block * _BLOCK, min((block + 1) * _BLOCK, last)):
                taken += len(text.encode())
                yield [text]
                if taken >= budget:
                    return

    def _texts_between(self, first: int, last: int) -> Iterator[str]:
        """Yield the texts of the documents from number `first` up to `last` that are kept."""
        gone = set(self.duplicates.between(first, last)["number"].to_pylist())
        place = int(np.searchsorted(self.starts, first, side="right")) - 1
        while place < len(self.summaries) and (start := self.starts[place]) < last:
            files = TextFiles(self.texts, self.summaries[place]["index"])
            rows = files.texts(first - start, last - start, self.summaries[place]["batches"])
            yield from (text for row, text in rows if text and start + row not in gone)
            place += 1

    # --- the end ---

    def finish(
        self, summaries: list[dict[str, Any]], split: SplitPlan, facts: dict[str, Any]
    ) -> list[Record]:
        """Write the table of documents and the samples; return the record of each stage."""
        stages = self.paths.final / "stages"
        stages.mkdir(exist_ok=True)
        places, funnel = _Places(split, facts), Funnel()
        with DecisionsWriter(stages / TABLE) as table:
            for role, batch in self._fates():
                funnel.add(batch)
                table.add(places.add(batch, role))
        samples = Samples()
        for place, (one, two) in enumerate(zip(self.summaries, summaries, strict=True)):
            samples.merge(one["samples"], self.starts[place])
            samples.merge(two["samples"])
        write_json(stages / SAMPLES, dict(sorted(samples.found.items())))
        shutil.copyfile(self._times, stages / self._times.name)
        return self._records(funnel)

    def _fates(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the role of the next documents, and what became of them (FATES)."""
        for summary in self.summaries:
            for batch in file_batches(fates_path(self.paths.ranges, summary["index"])):
                yield summary["role"], batch

    def _records(self, funnel: Funnel) -> list[Record]:
        """Return the record of each stage; report those that dropped nearly all documents that they got."""
        before: list[Record] = [
            {"stage": name, "settings": self._settings(name), "counters": counters}
            for name, counters in self.fetched.items()
        ]
        records = before + funnel.records({name: self._settings(name) for name in self.chain.after_fetch})
        for record in records:
            counters = record["counters"]
            if counters.get("dropped", 0) > _MANY * counters.get("documents", 0):
                reason, number = max(counters["reasons"].items(), key=lambda item: item[1])
                self.console.print(
                    f"warning: {record['stage']} dropped {counters['dropped']:,} of "
                    f"{counted(counters['documents'], 'document')}, {number:,} of them because of: {reason}"
                )
        return records

    def _settings(self, name: str) -> dict[str, Any]:
        return self.chain.or_default(stage_class(name)).model_dump(mode="json")

    def report(self, manifest: dict[str, Any]) -> None:
        """Write the page about what became of the documents, where the packages for it are installed."""
        samples = read_json(self.paths.final / "stages" / SAMPLES, "samples")
        name = ", ".join([*self.options.inputs, *self.options.urls][:_NAMED])
        try:
            missing = write_report(self.paths.final, shown(name), manifest, samples)
        except (ShoalError, OSError, ValueError) as error:  # of texts that are strangers'
            missing = f"no report.html: {error}"
        if missing:
            self.console.print(missing, markup=False)

    def refuse_nothing_left(self) -> None:
        """Raise a DataError that names the stage that dropped most."""
        funnel = Funnel()
        for _, batch in self._fates():
            funnel.add(batch)
        records = [record for record in self._records(funnel) if record["stage"] not in self.fetched]
        most = max(records, key=lambda record: record["counters"]["dropped"])
        if not most["counters"]["dropped"]:
            raise DataError("there is no document in the main input", hint="check what it holds")
        total = funnel.documents
        reason, number = max(most["counters"]["reasons"].items(), key=lambda item: item[1])
        raise DataError(
            f"no document is left of {total:,}: {most['stage']} dropped {most['counters']['dropped']:,}, "
            f"{number:,} of them because of: {reason}",
            hint=f"change the settings of {most['stage']}: `shoal prepare --show-stages` prints them",
        )


def _before(counters: dict[str, int], kept: str) -> dict[str, Any]:
    """Return the counters of a stage before the documents: what it got and dropped, by reason."""
    reasons = {
        name: number for name, number in sorted(counters.items()) if number and name not in (kept, "urls")
    }
    dropped = sum(reasons.values())
    return {"documents": counters.get(kept, 0) + dropped, "dropped": dropped, "reasons": reasons}


class Funnel:
    """Counts documents and characters by the stage that dropped them, and why."""

    def __init__(self) -> None:
        self.documents = 0
        self._dropped: dict[str, Counter[str]] = {}  # by stage and reason
        self._chars = Counter[str]()  # by stage

    def add(self, fates: pa.RecordBatch) -> None:
        """Add documents (FATES)."""
        self.documents += len(fates)
        table = pa.table(fates).filter(pc.field("stage").is_valid())
        grouped = table.group_by(["stage", "reason"]).aggregate([("chars", "sum"), ("number", "count")])
        for row in grouped.to_pylist():
            stage, reason = row["stage"], row["reason"]
            if stage in DUPLICATE:
                stage, reason = DedupSettings.name, f"{stage}: {reason}"
            self._dropped.setdefault(stage, Counter())[reason] += row["number_count"]
            self._chars[stage] += row["chars_sum"]

    def records(self, settings: dict[str, dict[str, Any]]) -> list[Record]:
        """Return the record of each stage, in order: reading, then those in `settings`."""
        left, found = self.documents, []
        for name, values in {READ: {}, PAGES: {}, **settings}.items():
            reasons = self._dropped.get(name, Counter())
            if name == PAGES and not reasons:
                continue
            counters = {
                "documents": left,
                "dropped": reasons.total(),
                "chars_dropped": self._chars[name],
                "reasons": dict(sorted(reasons.items())),
            }
            found.append({"stage": name, "settings": values, "counters": counters})
            left -= reasons.total()
        return found


class _Places:
    """Gives documents their split and their place in it, as `assemble` does."""

    def __init__(self, plan: SplitPlan, facts: dict[str, Any]) -> None:
        self._plan, self._facts = plan, facts
        self._main, self._next = 0, [0] * len(SPLITS)

    def add(self, fates: pa.RecordBatch, role: str) -> pa.RecordBatch:
        """Return the next documents (FATES) as DECISIONS."""
        kept = fates.column("stage").is_null().to_numpy(zero_copy_only=False)
        number = int(kept.sum())
        if role != "main":
            splits = np.full(number, SPLITS.index(role))
        elif self._plan.by == "documents":
            splits = self._plan.of_documents(self._main, number).astype(np.int64)
            self._main += number
        else:  # a document may lie in two splits
            splits = np.full(number, -1)
        places = np.full(number, -1)
        for split, name in enumerate(SPLITS):
            here = splits == split
            places[here] = np.arange(self._next[split], self._next[split] + here.sum())
            if here.any() and self._plan.shuffled:
                places[here] = shuffled_place(
                    places[here], self._facts[name]["documents"], self._plan.seed, name
                )
            self._next[split] += int(here.sum())
        columns = []
        for values, kind in ((splits, pa.int8()), (places, pa.int64())):
            whole = np.full(len(kept), -1)
            whole[kept] = values
            columns.append(pa.array(whole, kind, mask=whole < 0))
        return pa.RecordBatch.from_arrays([*fates.columns, *columns], schema=DECISIONS)
