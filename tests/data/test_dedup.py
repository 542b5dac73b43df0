"""Duplicates among documents: against brute force, in any cut, in bounded memory, after kills."""

import json
import os
import random
import re
import resource
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from shoal.data.prepare.dedup import find as find_module
from shoal.data.prepare.dedup.bands import BAND, read_groups
from shoal.data.prepare.dedup.find import OLD_KEY, PARAGRAPHS_NAME, find_duplicates
from shoal.data.prepare.dedup.minhash import Signer
from shoal.data.prepare.dedup.paragraphs import without_paragraphs
from shoal.data.prepare.dedup.ranges import bucket_count
from shoal.data.prepare.dedup.settings import DedupSettings, candidate_probability
from shoal.data.prepare.dedup.verify import PAIRS_JOB, SETS_JOB, Pairs
from shoal.errors import DataError
from tests.cases import every
from tests.data.narrow import SENTENCES, TEXT, decisions, near, run_jobs, texts, write_ranges

LEVELS = (0.95, 0.9, 0.8, 0.6, 0.3)


def fresh_words(rng, number=120):
    return [f"w{rng.randrange(10**5)}" for _ in range(number)]


@pytest.fixture(scope="module")
def planted():
    """Return 5,000 documents in random order, and for each planted pair its level and its two places."""
    rng, values = random.Random(0), []
    for number in range(2500):
        base = fresh_words(rng)
        values += [" ".join(base), " ".join(near(base, LEVELS[number % 5], rng, "x"))]
    order = list(range(len(values)))
    rng.shuffle(order)
    place = np.argsort(order)
    pairs = [(LEVELS[n % 5], *sorted(map(int, place[2 * n : 2 * n + 2]))) for n in range(2500)]
    return [values[old] for old in order], pairs


def brute_force(values):
    """Return the Jaccard similarities (CSR) of all pairs with a common 5-gram of words."""
    number, rows, columns = {}, [], []
    for row, value in enumerate(values):
        words = re.findall(r"\w+", value.lower())
        grams = set(zip(*(words[at:] for at in range(5)), strict=False))
        rows += [row] * len(grams)
        columns += [number.setdefault(gram, len(number)) for gram in grams]
    held = csr_array((np.ones(len(rows), np.int32), (rows, columns)))
    common = (held @ held.T).tocoo()
    sizes = held.sum(axis=1)
    union = sizes[common.row] + sizes[common.col] - common.data
    return csr_array((common.data / union, (common.row, common.col)))


def as_rows(table):
    return {row["number"]: row for row in table.to_pylist()}


def test_recall_and_precision_against_brute_force(planted, tmp_path):
    values, pairs = planted
    true = brute_force(values)
    bands = Signer(DedupSettings()).sign(texts(values)).column("bands").flatten().to_numpy().reshape(-1, 14)
    dropped = as_rows(decisions(tmp_path, values))
    for level in LEVELS:
        ends = [(a, b) for planted_at, a, b in pairs if planted_at == level]
        expected = np.mean([candidate_probability(true[pair], 14, 8) for pair in ends])
        assert np.mean([(bands[a] == bands[b]).any() for a, b in ends]) == pytest.approx(expected, abs=0.05)
        found = np.mean([b in dropped for _, b in ends])
        assert found == (pytest.approx(expected, abs=0.05) if level >= 0.8 else 0)
    assert all(true[row["number"], row["twin"]] >= 0.8 for row in dropped.values())
    assert all(row["exact"] == pytest.approx(true[number, row["twin"]]) for number, row in dropped.items())
    assert np.std([row["exact"] - row["estimated"] for row in dropped.values()]) < 0.04
    assert {(row["stage"], row["cluster_size"]) for row in dropped.values()} == {("near", 2)}


@pytest.fixture(scope="module")
def crowd():
    """Return documents with everything in them: equal ones, chains, large groups, nulls, scripts."""
    rng, values = random.Random(1), [None, "", " ", "word", "word", "Word!"]
    for _ in range(20):
        chain = [fresh_words(rng)]
        for _ in range(5):
            chain.append(near(chain[-1], 0.88, rng, "y"))
        values += [" ".join(words) for words in chain]
    base = fresh_words(rng, 60)
    values += [" ".join([*base, *fresh_words(rng, rng.choice([1, 2, 3, 20, 60]))]) for _ in range(150)]
    values += [" ".join(fresh_words(rng)) for _ in range(100)]
    values += [sentence * 3 + f" {number} {number}" for sentence in SENTENCES.values() for number in range(4)]
    values += rng.choices(values, k=60)
    rng.shuffle(values)
    return values


@pytest.mark.parametrize(("cuts", "rows"), [((1, 2, 50, 333), 7), (range(10, 400, 10), 100)])
def test_decisions_do_not_depend_on_the_cut_of_the_ranges(crowd, cuts, rows, tmp_path):
    whole = decisions(tmp_path / "whole", crowd)
    assert len(whole) > 150
    assert decisions(tmp_path / "cut", crowd, cuts=cuts, rows=rows).equals(whole)


def test_decisions_do_not_depend_on_memory_and_processes(crowd, monkeypatch, tmp_path):
    whole = decisions(tmp_path / "whole", crowd)
    monkeypatch.setattr("shoal.data.prepare.dedup.bands.bucket_count", lambda *facts: 13)
    monkeypatch.setattr(find_module, "_FEW_PAIRS", 5)
    assert decisions(tmp_path / "small", crowd, cuts=(100, 200)).equals(whole)


@pytest.mark.parametrize("max_rows", [1, 3, 4, 100])
def test_groups_are_read_whole_and_a_few_at_a_time(max_rows, tmp_path):
    rows = np.zeros(13, BAND)
    rows["key"], rows["number"] = [2, 2, 3, 3, 3, 3, 3, 8, 8, 9, 9, 9, 2**64 - 1], range(13)
    rows.tofile(tmp_path / "groups")
    parts = list(read_groups(tmp_path / "groups", max_rows))
    assert np.concatenate(parts).tolist() == rows.tolist()
    assert sum(len(set(part["key"].tolist())) for part in parts) == 5
    assert max(map(len, parts)) <= max_rows + 4  # the rest of a group
    (tmp_path / "none").write_bytes(b"")
    assert list(read_groups(tmp_path / "none", max_rows)) == []


def test_clusters_do_not_depend_on_the_order_of_the_documents(tmp_path):
    rng, values = random.Random(2), []
    for _ in range(100):
        chain = [fresh_words(rng)]
        for _ in range(6):
            chain.append(near(chain[-1], 0.9, rng, "y"))
        values += [" ".join(words) for words in chain]
    found = []
    for attempt in range(3):
        order = list(range(len(values)))
        rng.shuffle(order)
        rows = as_rows(decisions(tmp_path / str(attempt), [values[old] for old in order]))
        clusters = {}
        for place, old in enumerate(order):
            clusters.setdefault(rows[place]["survivor"] if place in rows else place, set()).add(old)
        assert all(row["survivor"] == min(row["survivor"], place) for place, row in rows.items())
        found.append(sorted(map(sorted, clusters.values())))
    assert found[0] == found[1] == found[2]
    assert max(map(len, found[0])) == 7


def test_clusters_are_the_components_of_the_similar_candidates(crowd, tmp_path):
    values = [value if value and len(value) > 300 and value.isascii() else None for value in crowd]
    filled = [value or "" for value in values]
    true = brute_force(filled).tocoo()
    bands = Signer(DedupSettings()).sign(texts(values)).column("bands").flatten().to_numpy().reshape(-1, 14)
    linked = (true.data >= 0.8) & (bands[true.row] == bands[true.col]).any(axis=1)
    graph = csr_array((np.ones(linked.sum()), (true.row[linked], true.col[linked])), (len(values),) * 2)
    _, component = connected_components(graph, directed=False)
    smallest = {label: int(np.flatnonzero(component == label)[0]) for label in component}
    sizes = Counter(component.tolist())
    rows = as_rows(decisions(tmp_path, values))
    assert max(sizes.values()) > 50
    assert {n: (row["survivor"], row["cluster_size"]) for n, row in rows.items()} == {
        n: (smallest[label], sizes[label]) for n, label in enumerate(component) if smallest[label] != n
    }
    for number, row in rows.items():
        assert row["stage"] == ("exact" if values[number] in values[:number] else "near")
        assert row["twin"] == values.index(values[number]) or row["stage"] == "near"


def test_a_group_of_many_documents_costs_few_comparisons(monkeypatch, tmp_path):
    compared, similar = [], Pairs.similar

    def counting(self, pairs, check):
        compared.append(len(pairs))
        return similar(self, pairs, check)

    monkeypatch.setattr(Pairs, "similar", counting)
    rng = random.Random(3)
    base = fresh_words(rng, 100)
    values = [" ".join([*base, f"page{number}"]) for number in range(3000)]
    table = decisions(tmp_path, values)
    assert set(table["survivor"].to_pylist()) == {0}
    assert len(table) == 2999
    assert sum(compared) < 2 * len(values)


def test_scripts_without_spaces_are_found_as_english_is(tmp_path):
    rng = random.Random(4)
    for language, sentence in SENTENCES.items():
        units = re.findall(r"\w+ ", sentence) if language == "english" else list(sentence.replace(" ", ""))
        values = []
        for _ in range(60):
            base = rng.choices(units, k=300)
            at = rng.randrange(290)
            values += ["".join(base), "".join([*base[:at], *rng.choices(units, k=6), *base[at + 6 :]])]
        rows = as_rows(decisions(tmp_path / language, values))
        assert len(rows) >= 57, language
        assert all((row["number"], row["stage"]) == (row["twin"] + 1, "near") for row in rows.values())


def test_equal_texts_are_the_same_bytes(tmp_path):
    table = decisions(
        tmp_path, ["a b", "c", None, "a b", "A b", None, "", "", "c"], DedupSettings(near=False)
    )
    assert table.select(["number", "stage", "twin", "exact"]).to_pydict() == {
        "number": [3, 8],
        "stage": ["exact", "exact"],
        "twin": [0, 1],
        "exact": [1.0, 1.0],
    }


def test_many_equal_documents(tmp_path):
    table = decisions(tmp_path, ["one and the same"] * 100_000, cuts=(30_000,), rows=20_000)
    assert table["twin"].to_numpy().max() == 0
    assert table["cluster_size"].to_numpy().min() == len(table) + 1 == 100_000


class KilledError(Exception):
    """In the place of a kill."""


@pytest.mark.parametrize("after", every(2, [0, 1, 3, 5, 6, 9]))
def test_a_run_that_was_killed_goes_on(crowd, after, monkeypatch, tmp_path):
    monkeypatch.setattr(find_module, "_FEW_PAIRS", 20)
    settings, done = DedupSettings(), []
    ranges = write_ranges(tmp_path / "ranges", crowd, settings, (100, 200, 300))

    def dying_jobs(job, spec, items):
        for item in items:
            if len(done) == after:
                raise KilledError
            done.append((job, json.dumps(item)))
            yield from run_jobs(job, spec, [item])

    with pytest.raises(KilledError):
        find_duplicates(tmp_path / "dedup", ranges, settings, dying_jobs, 1 << 30, print)
    after = -1
    path = find_duplicates(tmp_path / "dedup", ranges, settings, dying_jobs, 1 << 30, print)
    with pa.ipc.open_file(path) as file:
        assert file.read_all().equals(decisions(tmp_path / "whole", crowd))
    sets = [item for job, item in done if job == SETS_JOB]
    assert len(sets) == len(set(sets)) == 4  # no range twice
    assert {job for job, _ in done} == {SETS_JOB, PAIRS_JOB}
    count = len(done)
    assert find_duplicates(tmp_path / "dedup", ranges, settings, dying_jobs, 1 << 30, print) == path
    assert len(done) == count


def test_other_settings_begin_anew_and_other_signatures_are_refused(tmp_path):
    rng = random.Random(5)
    base = fresh_words(rng)
    values = [" ".join(base), " ".join(near(base, 0.9, rng, "x"))]
    ranges = write_ranges(tmp_path / "ranges", values, DedupSettings(), ())
    for threshold, dropped in ((0.8, 1), (0.99, 0), (0.8, 1)):
        settings = DedupSettings(threshold=threshold)
        path = find_duplicates(tmp_path / "dedup", ranges, settings, run_jobs, 1 << 30, print)
        assert pa.ipc.open_file(path).read_all().num_rows == dropped
        assert [path.parent] == [one for one in (tmp_path / "dedup").iterdir() if one.is_dir()]
    with pytest.raises(DataError, match="made with the settings"):
        find_duplicates(tmp_path / "dedup", ranges, DedupSettings(seed=1), run_jobs, 1 << 30, print)
    ranges[0].signatures.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot be read"):
        find_duplicates(tmp_path / "dedup", ranges, DedupSettings(), run_jobs, 1 << 30, print)


@pytest.mark.parametrize(("tokenizer", "more"), [("bytes", {}), ("word", {"vocab_size": 8000})])
def test_only_documents_that_are_not_in_an_older_dataset_stay(prepare, tokenizer, more, tmp_path):
    rng = random.Random(6)
    old = [" ".join(f"w{rng.randrange(200)}" for _ in range(120)) for _ in range(40)]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in old))
    dataset, _ = prepare(
        tmp_path / "old.jsonl", output=tmp_path / "old", tokenizer=tokenizer, split="80,10,10", **more
    )
    copies = [" ".join(near(text.split(), 0.9, rng, "x")) for text in old[:20]]
    fresh = [" ".join(fresh_words(rng)) for _ in range(20)]
    values = [*fresh, *old[20:], *copies, fresh[0], " ".join(near(copies[3].split(), 0.9, rng, "z"))]
    settings = DedupSettings(against=(str(dataset.path),))
    table = decisions(tmp_path, values, settings, cuts=(30,))
    rows = as_rows(table)
    assert rows.keys() == {*range(20, 62)}
    assert {rows[number]["stage"] for number in range(20, 60)} == {"against"}
    assert rows[60]["stage"] == "exact"
    assert (rows[61]["stage"], rows[61]["survivor"] < 0) == ("against", True)
    assert all(-40 <= rows[number]["twin"] < 0 and rows[number]["exact"] >= 0.8 for number in range(20, 60))
    assert json.loads(table.schema.metadata[OLD_KEY]) == [[str(dataset.path), -40, 40]]
    again = decisions(tmp_path, values, settings.model_copy(update={"threshold": 0.81}), cuts=(30,))
    assert again.equals(table)


def test_older_datasets_are_decoded_once(prepare, tmp_path):
    (tmp_path / "old.jsonl").write_text(json.dumps({"text": "some text of old"}) + "\n")
    dataset, _ = prepare(tmp_path / "old.jsonl", output=tmp_path / "old", split="1")
    settings, jobs = DedupSettings(against=(str(dataset.path),)), []
    ranges = write_ranges(tmp_path / "ranges", ["some text of old", "new"], settings, ())

    def noted(job, spec, items):
        jobs.append(job.split(":")[1])
        return run_jobs(job, spec, items)

    for threshold in (0.8, 0.9):
        settings = settings.model_copy(update={"threshold": threshold})
        path = find_duplicates(tmp_path / "dedup", ranges, settings, noted, 1 << 30, print)
        assert pa.ipc.open_file(path).read_all()["reason"].to_pylist() == [
            "equal to a document of another dataset"
        ]
    assert jobs == ["DecodeDataset"]


def test_paragraphs_that_occurred_before_are_cut_out(tmp_path):
    long = ["This paragraph is long enough to be cut, number " + word for word in ("one", "two", "three")]
    values = [
        f"{long[0]}\nshort\n{long[1]}",
        f"{long[0]}\nshort\n{long[2]}\n{long[2]}",
        None,
        f"  {long[0].replace(' ', '   ')}\n\n{long[1]}",  # nothing is left
        f"{long[2]}\nbut this is left",
        f"{long[0]}\nshort\n{long[1]}",  # equal to the first
        long[1],
    ]
    settings = DedupSettings(near=False, paragraphs=True, min_chars=20)
    tables = [decisions(tmp_path / str(cuts), values, settings, cuts) for cuts in ((), (1, 3, 4))]
    assert tables[0].equals(tables[1])
    assert tables[0].select(["number", "stage", "twin"]).to_pydict() == {
        "number": [3, 5, 6],
        "stage": ["paragraphs", "exact", "paragraphs"],
        "twin": [None, 0, None],
    }
    path = next((tmp_path / "()").glob(f"dedup/*/{PARAGRAPHS_NAME}"))
    cuts = {row["number"]: row["cut"] for row in pa.ipc.open_file(path).read_all().to_pylist()}
    assert cuts == {1: [0, 3], 3: [0, 2], 4: [0], 6: [0]}
    assert without_paragraphs(values[1], cuts[1]) == f"short\n{long[2]}"
    assert without_paragraphs(values[4], cuts[4]) == "but this is left"


MEMORY_SCRIPT = """
import sys, threading, time
from pathlib import Path
from shoal.data.prepare.dedup.find import find_duplicates
from shoal.data.prepare.dedup.ranges import bucket_count, RangeFiles
from shoal.data.prepare.dedup.settings import DedupSettings
from tests.data.narrow import run_jobs
folder, peak = Path(sys.argv[1]), [0]
def watch():
    while True:
        status = Path("/proc/self/status").read_text()
        peak[0] = max(peak[0], int(status.split("RssAnon:")[1].split()[0]) << 10)
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
ranges = [RangeFiles(folder / "documents.arrow", folder / f"{n}.narrow") for n in range(20)]
path = find_duplicates(folder / "dedup", ranges, DedupSettings(), run_jobs, int(sys.argv[2]), print)
print(peak[0])
"""


@pytest.mark.proof
def test_many_ranges_are_not_all_open_at_once(tmp_path):
    """Usual limits are 1,024 open files; 16 GB of text are 1,000 ranges."""
    rng, values = random.Random(1), []
    for n in range(250):  # near-duplicates of the first one in every range
        values.append(" ".join(near([f"word{n}" for n in range(200)], 0.95, rng, f"new{n}x")))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd")) + 160
    resource.setrlimit(resource.RLIMIT_NOFILE, (held, hard))
    try:
        table = decisions(tmp_path, values, cuts=range(1, 250))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert table.num_rows == 249


def test_a_bucket_is_sorted_within_a_quarter_of_the_memory():
    for rows, memory in ((10**6, 100 << 20), (10**8, 100 << 20), (10**9, 1 << 30)):
        count = bucket_count(rows, 16, memory)
        assert 4 * rows * 16 / count <= memory / 4  # sorting makes copies
        assert count == 1 or 4 * rows * 16 / (count - 1) > memory / 4


@pytest.mark.proof
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("per_range", "max_memory", "most"),  # a band's rows alone are 14 * 8 bytes a document
    [(30_000, 10 << 20, 160e6), (100_000, 100 << 20, 200e6)],
)
def test_many_documents_take_little_memory(tmp_path, per_range, max_memory, most):
    rng = np.random.default_rng(0)
    schema = Signer(DedupSettings()).schema
    batch = pa.record_batch([texts([f"document {n} of many" for n in range(1000)])], schema=TEXT)
    with pa.ipc.new_file(tmp_path / "documents.arrow", TEXT) as out:
        for _ in range(per_range // 1000):
            out.write_batch(batch)
    for number in range(20):
        exact = rng.integers(0, 1 << 63, (per_range, 2), np.uint64)
        exact[::10] = rng.integers(0, 1000, (per_range // 10, 1))  # a tenth in 1,000 groups of equal ones
        bands = rng.integers(0, 1 << 63, (per_range, 14), np.uint64)
        bands[1::1000] = rng.integers(0, 1000, (per_range // 1000, 14))  # some in groups of two or more
        columns = [
            pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), per_range, [None, pa.py_buffer(exact)]),
            pa.array(np.full(per_range, 1, np.int32)),
            pa.FixedSizeListArray.from_arrays(bands.ravel(), 14),
        ]
        with pa.ipc.new_file(tmp_path / f"{number}.narrow", schema) as out:
            out.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), str(max_memory)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
    assert printed[0] == f"{2 * per_range - 1000:,} equal documents"
    assert int(printed[-1]) < most
