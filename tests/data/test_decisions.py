"""The table of what became of each document: its bytes, finding a document, damage."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data.prepare import decisions
from shoal.data.prepare.decisions import DECISIONS, ROWS, TABLE, Decisions, DecisionsWriter
from shoal.errors import DataError, InputError
from tests.data.documents import dataset_of, decided


def url(number):
    return f"https://site{number % 7}.org/{number}"


@pytest.fixture
def table(tmp_path):
    """Return a table of 2.5 row groups over three files, the last with one document."""
    number = 5 * ROWS // 2
    rows = [{"file": n % 2, "offset": 10 * n, "url": url(n) if n % 3 else None} for n in range(number)]
    rows[-1] |= {"file": 2, "detail": "x" * 600, "exact": 0.5}
    files = ("web/a.jsonl", "web/b.jsonl", "web/more/c.html")
    return Decisions(dataset_of(tmp_path / "set", decided(rows), files, train=["a"]))


@pytest.mark.parametrize("number", [0, 1, ROWS - 1, ROWS, 2 * ROWS + 5])
def test_a_document_is_found_by_number_offset_and_url(table, number):
    found = table.row(number)
    assert (found["number"], found["offset"]) == (number, 10 * number)
    assert table.find(str(number)) == table.find(f"web/{'ab'[number % 2]}.jsonl:{10 * number}") == found
    assert table.find(f"{'ab'[number % 2]}.jsonl:{10 * number}") == found
    if number % 3:
        assert table.find(url(number)) == found


def test_a_file_is_enough_for_its_only_document(table):
    found = table.find("c.html")
    assert (found["number"], found["path"]) == (5 * ROWS // 2 - 1, "web/more/c.html")
    assert (len(found["detail"]), found["exact"]) == (512, 0.5)  # long texts are cut


@pytest.mark.parametrize(
    ("doc", "message", "hint"),
    [
        ("40960", f"has {5 * ROWS // 2:,} documents", "from 0 to 40959"),
        ("9" * 30, "is no number, URL or file", "did you mean"),
        ("web/a.jsom", "is no number, URL or file", "did you mean web/a.jsonl"),
        ("c.htm", "is no number, URL or file", "did you mean web/more/c.html"),
        ("a.jsonl", "20,480 documents", "FILE:OFFSET: a.jsonl:0"),
        ("jsonl", "is no number", "did you mean"),
        ("a.jsonl:21", "no document of a.jsonl begins at offset 21", "nearest is at 20"),
        ("a.jsonl:999999999", "no document", "nearest is at 409580"),
        ("https://site1.org/9", "no document has the URL", "did you mean https://site1.org/"),
        ("https://other.org/9", "no document has the URL", "shoal dataset show"),
    ],
)
def test_what_is_not_there_is_said_with_the_nearest(table, doc, message, hint):
    with pytest.raises(InputError) as caught:
        table.find(doc)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_name_of_two_files_is_ambiguous(tmp_path):
    files = ("x/a.txt", "y/a.txt")
    rows = [{"file": 0}, {"file": 1}]
    table = Decisions(dataset_of(tmp_path / "set", decided(rows), files, train=["a"]))
    with pytest.raises(InputError, match=r"2 files end in a.txt: x/a.txt and y/a.txt"):
        table.find("a.txt")
    assert table.find("y/a.txt")["number"] == 1


def test_the_bytes_do_not_depend_on_the_batches(tmp_path):
    rows = [
        {"url": url(n), "stage": None if n % 3 else "length", "reason": None if n % 3 else "too short"}
        for n in range(2 * ROWS + 100)
    ]
    for size in (1000, ROWS, len(rows)):
        with DecisionsWriter(tmp_path / f"{size}") as out:
            for first in range(0, len(rows), size):
                out.add(decided(rows[first : first + size], first))
    files = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert len(files) == 3
    assert files[0] == files[1] == files[2]
    assert pq.ParquetFile(tmp_path / "1000").metadata.num_row_groups == 3


def test_documents_out_of_order_are_an_error_that_leaves_no_file(tmp_path):
    with pytest.raises(AssertionError), DecisionsWriter(tmp_path / TABLE) as out:
        out.add(decided([{}], 5))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_table_has_no_document(tmp_path):
    table = Decisions(dataset_of(tmp_path / "set", decided([]), train=["a"]))
    with pytest.raises(InputError, match="has 0 documents"):
        table.find("0")
    with pytest.raises(InputError, match=r"a.jsonl has 0 documents"):
        table.find("a.jsonl")


def other_columns(path):
    pq.write_table(pa.table({"number": [0]}), path)


def large_groups(path):
    rows = [{} for _ in range(ROWS + 1)]
    pq.write_table(pa.Table.from_batches([decided(rows)]), path, row_group_size=ROWS + 1)


def wrong_number(path):
    pq.write_table(pa.Table.from_batches([decided([{}], 7)]), path)


def unknown_file(path):
    pq.write_table(pa.Table.from_batches([decided([{"file": 9}])]), path)


def unknown_split(path):
    pq.write_table(pa.Table.from_batches([decided([{"split": 5}])]), path)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-9])


def damaged_page(path):
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36
    path.write_bytes(content)


def no_files(path):
    (path.parent / "parse.json").write_text(json.dumps({"files": 3}))


@pytest.mark.parametrize(
    "damage",
    [
        other_columns,
        large_groups,
        wrong_number,
        unknown_file,
        unknown_split,
        cut_short,
        damaged_page,
        no_files,
    ],
)
def test_damage_is_said(tmp_path, damage):
    folder = dataset_of(tmp_path / "set", decided([{}]), train=["a"])
    damage(folder / "stages" / TABLE)
    with pytest.raises(DataError, match="is damaged"):
        Decisions(folder).find("0")


def test_a_row_group_that_claims_too_much_is_not_read(tmp_path, monkeypatch):
    folder = dataset_of(tmp_path / "set", decided([{"url": "x" * 2000}]), train=["a"])
    monkeypatch.setattr(decisions, "_MAX_GROUP", 1000)
    with pytest.raises(DataError, match="a row group of more than"):
        Decisions(folder)


def test_the_columns_are_those_of_the_schema():
    assert DECISIONS.names == list(decided([{}]).schema.names)
