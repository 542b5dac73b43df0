"""`report.html` of a dataset that was prepared by stages: what was kept and dropped, why, and examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shoal.data.prepare.decisions import DUPLICATE, Decisions
from shoal.data.prepare.samples import PER_REASON, SHOWN_CHARS, Found
from shoal.data.prepare.steps import REPORT
from shoal.errors import InputError, counted
from shoal.page.pictures import bars
from shoal.page.render import Picture, Table, check_packages, render
from shoal.runtime.files import write_text

_MOST_ROWS = 200  # of a table: reasons are few, but the file may be a stranger's
_MOST_BARS = 12
_SHORTEST, _LONGEST = 6, 17  # binary logarithms of the lengths that have bars of their own

Fate = tuple[str | None, str | None]  # (stage, reason); (None, None): kept


def write_report(dataset: Path, name: str, manifest: Mapping[str, Any], samples: Found) -> str:
    """Write `report.html` into the folder of a dataset; return what is missing, if packages are, in words."""
    try:
        check_packages()
    except InputError as error:
        return f"no {REPORT}: {error.message} ({error.hint})"
    write_text(dataset / REPORT, report_page(dataset, name, manifest, samples))
    return ""


def report_page(dataset: Path, name: str, manifest: Mapping[str, Any], samples: Found) -> str:
    """Return the page, from the table of documents, the manifest's lineage, and samples."""
    totals = _Totals(Decisions(dataset))
    stages = [str(record["stage"]) for record in manifest["lineage"]]
    order = [name for stage in stages for name in (DUPLICATE if stage == "dedup" else (stage,))]
    fates = sorted(totals.documents, key=lambda fate: _rank(fate, order, totals))
    return render(
        Path(__file__).with_name("report.html"),
        name=name,
        answer=_answer(totals),
        pictures=list(_pictures(totals, fates)),
        funnel=_funnel(totals, fates),
        examples={reason: samples[reason] for reason in sorted(samples)[:_MOST_ROWS]},
        settings=_settings(manifest["lineage"]),
        per_reason=PER_REASON,
        shown_chars=SHOWN_CHARS,
    )


class _Totals:
    """Sums over the table of documents."""

    def __init__(self, table: Decisions) -> None:
        self.documents, self.chars = Counter[Fate](), Counter[Fate]()
        self.lengths, self.languages = Counter[tuple[bool, int]](), Counter[tuple[bool, str]]()
        self.clusters = Counter[int]()  # documents by the size of their cluster
        for part in table.tables(["number", "stage", "reason", "language", "chars", "cluster"]):
            size = pc.floor(pc.log2(pc.max_element_wise(part["chars"], 1)))
            grouped = part.append_column("size", pc.cast(size, pa.int32())).group_by(
                ["stage", "reason", "language", "size"]
            )
            for row in grouped.aggregate([("number", "count"), ("chars", "sum")]).to_pylist():
                fate, number, chars = (
                    (row["stage"], row["reason"]),
                    row["number_count"],
                    row["chars_sum"] or 0,
                )
                self.documents[fate] += number
                self.chars[fate] += chars
                if chars:
                    kept, size = fate[0] is None, min(max(row["size"], _SHORTEST), _LONGEST)
                    self.lengths[kept, size] += number
                    self.languages[kept, row["language"] or "not identified"] += number
            for row in part["cluster"].drop_null().value_counts().to_pylist():
                self.clusters[row["values"]] += row["counts"]
        self.total = sum(self.documents.values())
        self.kept = sum(number for (stage, _), number in self.documents.items() if stage is None)


def _rank(fate: Fate, order: Sequence[str], totals: _Totals) -> tuple[int, str, int, str]:
    """Order fates by stage as in the chain, then by number of documents; what is kept comes last."""
    stage, reason = fate
    place = len(order) + 1 if stage is None else order.index(stage) if stage in order else len(order)
    return place, stage or "", -totals.documents[fate], reason or ""


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"


def _answer(totals: _Totals) -> str:
    """Say how many documents are kept, and what drops the most."""
    share = _share(totals.kept, totals.total)
    answer = f"{totals.kept:,} of {counted(totals.total, 'document')} ({share}) are kept."
    dropped = [(number, fate) for fate, number in totals.documents.items() if fate[0] is not None]
    if dropped:
        number, (stage, reason) = max(dropped, key=lambda one: (one[0], str(one[1])))
        answer += (
            f" The most frequent reason to drop one is {stage}: {reason} ({_share(number, totals.total)})."
        )
    return answer


def _pictures(totals: _Totals, fates: Sequence[Fate]) -> Iterator[Picture]:
    """Yield the pictures that have something to show, each with a sentence that says what."""
    by_stage = Counter[str]()
    for stage, reason in fates:
        if stage is not None:
            by_stage[stage] += totals.documents[stage, reason]
    if by_stage:
        yield _stages(totals.total, by_stage)
    if totals.lengths:
        halves = [
            f"half of those {word} have fewer than {limit:,} characters"
            for word, kept in (("kept", True), ("dropped", False))
            if (limit := _median_limit(totals.lengths, kept))
        ]
        names = {size: f"{1 << size:,} to {(2 << size) - 1:,}" for size in range(_SHORTEST, _LONGEST + 1)}
        names |= {_SHORTEST: f"below {2 << _SHORTEST:,}", _LONGEST: f"{1 << _LONGEST:,} and more"}
        yield _compared(
            f"Of the documents with text, {'; '.join(halves)}.", totals.lengths, names, "characters"
        )
        number = sum(totals.languages.values())
        common = Counter[str]()
        for (_, language), count in totals.languages.items():
            common[language] += count
        shown = sorted(common, key=lambda language: (-common[language], language))[:_MOST_BARS]
        sentence = (
            f"{_share(common[shown[0]], number)} of the documents with text have the language {shown[0]}."
        )
        yield _compared(sentence, totals.languages, {one: one for one in shown}, "language")
    if totals.clusters:
        sizes = sorted(totals.clusters)[:_MOST_BARS]
        sentence = (
            f"{counted(sum(totals.clusters.values()), 'document')} lie in clusters of near-duplicates; "
            f"the largest cluster has {max(totals.clusters):,}."
        )
        numbers = [totals.clusters[size] for size in sizes]
        notes, caption = [f"{number:,}" for number in numbers], "Documents by the size of their cluster."
        picture = bars([f"{size:,}" for size in sizes], {"documents": numbers}, notes, "documents")
        yield Picture(sentence, picture, caption)


def _stages(total: int, by_stage: Mapping[str, int]) -> Picture:
    """Show how many documents are left after each stage."""
    left, lost = [total], [0]
    for number in by_stage.values():
        left, lost = [*left, left[-1] - number], [*lost, number]
    notes = [
        f"{total:,}",
        *(f"{after:,} (-{number:,})" for after, number in zip(left[1:], lost[1:], strict=True)),
    ]
    stage, most = max(by_stage.items(), key=lambda one: one[1])
    sentence = f"The stage {stage} drops the most documents: {most:,} of {total:,} ({_share(most, total)})."
    picture = bars(["read", *by_stage], {"left": left, "dropped here": lost}, notes, "documents")
    return Picture(sentence, picture, "Documents that are left after each stage.")


def _median_limit(lengths: Mapping[tuple[bool, int], int], kept: bool) -> int:
    """Return the power of two below which half of the lengths lie; 0 where there are none."""
    number = sum(count for (is_kept, _), count in lengths.items() if is_kept is kept)
    below = 0
    for size in range(_SHORTEST, _LONGEST + 1):
        below += lengths.get((kept, size), 0)
        if number and 2 * below >= number:
            return 2 << size
    return 0


def _compared(
    sentence: str, counts: Mapping[tuple[bool, Any], int], names: Mapping[Any, str], what: str
) -> Picture:
    """Show how many documents of each kind are kept and dropped."""
    parts = {
        word: [counts.get((kept, key), 0) for key in names]
        for word, kept in (("kept", True), ("dropped", False))
    }
    notes = [f"{sum(both):,}" for both in zip(*parts.values(), strict=True)]
    return Picture(sentence, bars(list(names.values()), parts, notes, "documents"), f"Documents by {what}.")


def _funnel(totals: _Totals, fates: Sequence[Fate]) -> Table:
    """List what each stage dropped, and what is left."""
    rows = [
        [
            _cell(stage or "kept"),
            f"{totals.documents[stage, reason]:,}",
            _share(totals.documents[stage, reason], totals.total),
            f"{totals.chars[stage, reason]:,}",
            _cell(reason or ""),
        ]
        for stage, reason in fates[-_MOST_ROWS:]
    ]
    headings = ("stage", "documents", "share", "characters", "reason")
    return Table(
        "Documents by stage and reason", headings, rows, "Characters: when a document was dropped or kept."
    )


def _settings(lineage: Sequence[Mapping[str, Any]]) -> Table:
    """List the settings of each stage."""
    rows = [
        [_cell(record["stage"]), _cell(name), _cell(value)]
        for record in lineage
        for name, value in record.get("settings", {}).items()
    ]
    return Table("Settings of the stages", ("stage", "setting", "value"), rows[:_MOST_ROWS])


def _cell(value: Any) -> str:
    """Return a value as one short line."""
    return " ".join(str(value).split())[:SHOWN_CHARS]
