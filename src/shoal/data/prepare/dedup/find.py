"""From the narrow rows of all ranges to a decision on each duplicate. Runs in the main process.

What is done is committed piece by piece in a folder of its own, so that a run that was killed goes on there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shoal.data.prepare.dedup.against import Against
from shoal.data.prepare.dedup.bands import find_equal, find_groups, read_groups
from shoal.data.prepare.dedup.candidates import Clusters, compare_groups
from shoal.data.prepare.dedup.paragraphs import find_paragraphs
from shoal.data.prepare.dedup.ranges import Numbered, RangeFiles, RunJobs, Say, load, save
from shoal.data.prepare.dedup.settings import DedupSettings
from shoal.data.prepare.dedup.verify import PAIR, PAIRS_JOB, SETS_JOB, Pairs, has_sets
from shoal.errors import counted
from shoal.runtime.files import atomic_write, digest_of

DECISIONS = pa.schema(
    [
        ("number", pa.int64()),  # of the dropped document
        ("stage", pa.string()),  # exact, near, against, paragraphs
        ("reason", pa.string()),
        ("survivor", pa.int64()),  # the one document of its cluster that stays
        ("twin", pa.int64()),  # the document it was compared with; negative: of an older dataset
        ("estimated", pa.float64()),  # share of equal minimums, of the pair (number, twin)
        ("exact", pa.float64()),  # Jaccard similarity of the shingle sets of the same pair
        ("cluster_size", pa.int64()),
    ]
)
CLUSTERS = pa.schema([("number", pa.int64()), ("cluster_size", pa.int64())])  # of those that stay
DECISIONS_NAME, PARAGRAPHS_NAME = "decisions.arrow", "paragraphs.arrow"
CLUSTERS_NAME = "clusters.arrow"
OLD_KEY = b"shoal.against"  # schema metadata: a JSON list of [dataset, its first number, its documents]
_FEW_PAIRS = 4096  # compared in this process: starting others takes longer
_GROUP_ROWS = 1 << 18  # in work at a time
_DECIDED_ROWS = 1 << 16


def find_duplicates(
    folder: Path,
    ranges: list[RangeFiles],
    settings: DedupSettings,
    run_jobs: RunJobs,
    max_memory_bytes: int,
    say: Say,
) -> Path:
    """Return an Arrow file (DECISIONS) of the documents that are dropped, sorted by number.

    A document's number is its place among all rows of `ranges`. The smallest number of a cluster stays. With
    `settings.paragraphs`, PARAGRAPHS_NAME beside it says which paragraphs of kept documents go.
    """
    against = Against(folder, settings, run_jobs, say)
    numbered = Numbered(against.ranges, ranges, settings)
    facts = [settings.model_dump(mode="json"), numbered.rows, against.digests, max_memory_bytes]
    work = folder / digest_of({"facts": facts})[:16]
    for other in folder.glob("[0-9a-f]" * 16):
        if other != work:
            shutil.rmtree(other)
    path = work / DECISIONS_NAME
    if path.exists():
        return path
    equal = find_equal(work, numbered, max_memory_bytes)
    say(f"{counted(len(equal), 'equal document')}")
    pairs, clusters = np.zeros(0, PAIR), Clusters()
    if settings.near:
        files = find_groups(work, numbered, equal, settings.bands, max_memory_bytes)
        _make_sets(work, numbered, files, settings, run_jobs)
        pairs = _compare(work, numbered, files, clusters, settings, run_jobs)
        say(f"{counted(len(pairs), 'similar pair')}")
    decided = _decide(equal, pairs, clusters)
    emptied = np.zeros(0, np.int64)
    if settings.paragraphs:
        emptied = find_paragraphs(work, numbered, decided["a"], max_memory_bytes, work / PARAGRAPHS_NAME)
    _write_clusters(work / CLUSTERS_NAME, decided)
    _write(path, decided, emptied, against)
    for name in ("rows", "groups", "sets"):
        shutil.rmtree(work / name, ignore_errors=True)
    return path


def _make_sets(
    work: Path, numbered: Numbered, files: list[Path], settings: DedupSettings, run_jobs: RunJobs
) -> None:
    """Make the shingle sets of all documents that are in a group, range by range."""
    path, origin = work / "wanted.npy", int(numbered.starts[0])
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        wanted = np.lib.format.open_memmap(temporary, "w+", np.bool_, (numbered.total + 1,))
        for file in files:
            for rows in read_groups(file, _GROUP_ROWS):
                wanted[rows["number"] - origin] = True
        wanted.flush()
        temporary.rename(path)
    marks = load(path)
    items = []
    for index, start in enumerate(numbered.starts[:-1].tolist()):
        first, last = start - origin, int(numbered.starts[index + 1]) - origin
        if marks[first:last].any() and not has_sets(work, index):
            documents = str(numbered.files[index].documents)
            items.append({"index": index, "documents": documents, "start": start, "first": first})
    for _ in run_jobs(SETS_JOB, _spec(work, numbered, settings), items) if items else ():
        pass


def _spec(work: Path, numbered: Numbered, settings: DedupSettings) -> dict[str, Any]:
    """Return what the jobs must know, as plain values."""
    return {
        "settings": settings.model_dump(mode="json"),
        "work": str(work),
        "starts": numbered.starts.tolist(),
    }


def _compare(
    work: Path,
    numbered: Numbered,
    files: list[Path],
    clusters: Clusters,
    settings: DedupSettings,
    run_jobs: RunJobs,
) -> NDArray[Any]:
    """Return the similar pairs of all groups, file by file; each file's pairs are committed once."""
    spec = _spec(work, numbered, settings)
    here, parts = Pairs(spec), work / "pairs"

    def compare(pairs: NDArray[Any]) -> NDArray[Any]:
        if len(pairs) <= _FEW_PAIRS:
            return here.similar(pairs, lambda done: None)
        shutil.rmtree(parts, ignore_errors=True)
        save(parts / "pairs.npy", pairs[np.lexsort((pairs["b"], pairs["a"]))])
        firsts = range(0, len(pairs), _FEW_PAIRS)
        found = [parts / f"{first:012d}.npy" for first in firsts]
        facts = {"pairs": str(parts / "pairs.npy"), "number": _FEW_PAIRS}
        items = [{**facts, "first": n, "found": str(path)} for n, path in zip(firsts, found, strict=True)]
        for _ in run_jobs(PAIRS_JOB, spec, items):
            pass
        return np.concatenate([load(path) for path in found])

    found = [np.zeros(0, PAIR)]
    for file in files:
        path = work / "similar" / f"{file.stem}.npy"
        if path.exists():
            found.append(np.load(path))
            clusters.join(found[-1]["a"], found[-1]["b"])
            continue
        new = [compare_groups(rows, clusters, compare) for rows in read_groups(file, _GROUP_ROWS)]
        found.append(np.concatenate([np.zeros(0, PAIR), *new]))
        save(path, found[-1])
    shutil.rmtree(parts, ignore_errors=True)
    return np.concatenate(found)


_DECIDED = np.dtype([*PAIR.descr, ("survivor", "<i8"), ("size", "<i8"), ("equal", "?")])


def _decide(equal: NDArray[Any], pairs: NDArray[Any], clusters: Clusters) -> NDArray[Any]:
    """Return one row for each dropped document of `ranges`, by number: `a` is the document, `b` its twin."""
    ends = np.concatenate([pairs, pairs])
    ends["a"][len(pairs) :], ends["b"][len(pairs) :] = pairs["b"], pairs["a"]
    ends = ends[np.lexsort((ends["b"], ends["a"]))]
    ends = ends[np.unique(ends["a"], return_index=True)[1]]  # the twin is the smallest neighbour
    ends = ends[clusters.label(ends["a"].astype(np.int64)) != ends["a"]]
    decided = np.zeros(len(equal) + len(ends), _DECIDED)
    for name in PAIR.fields or ():
        decided[name][len(equal) :] = ends[name]
    top = decided[: len(equal)]
    top["a"], top["b"], top["estimated"], top["exact"], top["equal"] = (
        equal["number"], equal["first"], 1.0, 1.0, True,
    )  # fmt: skip
    inner = np.where(decided["equal"], decided["b"], decided["a"])
    decided["survivor"] = clusters.label(inner)
    _, place, sizes = np.unique(decided["survivor"], return_inverse=True, return_counts=True)
    decided["size"] = sizes[place] + 1
    decided = decided[decided["a"] >= 0]
    return decided[np.argsort(decided["a"])]


def _write_clusters(path: Path, decided: NDArray[Any]) -> None:
    """Write the size of the cluster of each document that stays, by number."""
    numbers, first = np.unique(decided["survivor"], return_index=True)
    own = numbers >= 0
    columns = [pa.array(numbers[own]), pa.array(decided["size"][first[own]])]
    with atomic_write(path) as file, pa.ipc.new_file(file, CLUSTERS) as out:
        out.write_batch(pa.RecordBatch.from_arrays(columns, schema=CLUSTERS))


def _write(path: Path, decided: NDArray[Any], emptied: NDArray[np.int64], against: Against) -> None:
    """Write the decisions: `decided` rows, and the documents that lost all their paragraphs."""
    empty = np.zeros(len(emptied), _DECIDED)
    empty["a"] = emptied
    rows = np.concatenate([decided, empty])
    lost = np.arange(len(rows)) >= len(decided)
    order = np.argsort(rows["a"])
    rows, lost = rows[order], lost[order]
    schema = DECISIONS.with_metadata({OLD_KEY: json.dumps(against.datasets).encode()})
    with atomic_write(path) as file, pa.ipc.new_file(file, schema) as out:
        for low in range(0, len(rows), _DECIDED_ROWS):
            part, gone = rows[low : low + _DECIDED_ROWS], lost[low : low + _DECIDED_ROWS]
            old = (part["survivor"] < 0) & ~gone
            stage = np.select([gone, old, part["equal"]], ["paragraphs", "against", "exact"], "near")
            source = np.where(old, "a document of another dataset", "an earlier document")
            reason = np.char.add(np.where(part["equal"], "equal to ", "similar to "), source)
            columns = [part["a"], stage, np.where(gone, "all paragraphs occurred before", reason)]
            facts = [part[name] for name in ("survivor", "b", "estimated", "exact", "size")]
            arrays = [pa.array(column) for column in columns]
            arrays += [pa.array(fact, mask=gone) for fact in facts]
            batch = [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)]
            out.write_batch(pa.RecordBatch.from_arrays(batch, schema=schema))
