from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data.boundaries import AFTER_WORD, ANYWHERE, BETWEEN_WORDS
from shoal.data.prepare import kinds, parse
from shoal.data.prepare.options import PrepareOptions
from shoal.data.prepare.parse import Format, Notes, first_bad_byte, parse_range
from shoal.data.prepare.plan import limit_ranges, plan_ranges, refuse_wrong_keys
from shoal.data.prepare.sources import find_sources, in_words
from shoal.errors import DataError, InputError

PLAIN = Format("text", None, None, AFTER_WORD)
TEXTS = [
    "one two three",
    "",
    "vier fünf 六七。八",
    'quote " comma , tab\t',
    "line\nbreak\r\nend",
    " x ",
    "👍" * 30,
    "z" * 99,
]


def sources_of(*paths, **options):
    return search(*paths, **options)[0]


def search(*paths, **options):
    """Return the sources in these paths, and what was passed over."""
    return find_sources(PrepareOptions(tuple(map(str, paths)), output=paths[0].parent / "out", **options))


def rows(paths, form=PLAIN, range_bytes=1 << 20, limit=None):
    """Parse files in ranges; return all rows with the index of their range."""
    files = sources_of(*paths)
    ranges = plan_ranges(files, range_bytes, separator=form.separator, cuttable=form.cut is not None)
    files = dict(enumerate(files))
    if limit is not None:
        ranges = limit_ranges(ranges, files, form, limit)
    return [row for work in ranges for batch in parse_range(work, files, form) for row in batch.to_pylist()]


def documents(found):
    """Join the pieces of each document; return {(file, offset): text or reason}."""
    whole, key = {}, None
    for row in found:
        if row["starts"]:
            key = (row["file"], row["offset"])
            assert key not in whole
            whole[key] = ""
        whole[key] += row["reason"] if row["text"] is None else row["text"]
    return whole


def write_jsonl(path, values=TEXTS, key="text"):
    path.write_bytes(b"".join(json.dumps({"n": n, key: v}).encode() + b"\n" for n, v in enumerate(values)))
    return path


def make(kind, folder):
    """Write TEXTS in a format; return its path."""
    path = folder / f"in.{kind}"
    lines = write_jsonl(folder / "plain.jsonl").read_bytes()
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines[:200]) + gzip.compress(lines[200:]))
    elif kind == "jsonl.zst":
        path.write_bytes(b"".join(bytes(pa.compress(part, "zstd")) for part in (lines[:200], lines[200:])))
    elif kind == "parquet":
        pq.write_table(pa.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=2)
    elif kind in ("csv", "tsv"):
        import csv

        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="," if kind == "csv" else "\t").writerows(
                [("n", "text"), *enumerate(TEXTS)]
            )
    else:
        path.write_bytes(lines)
    (folder / "plain.jsonl").unlink()
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("range_bytes", [1, 40, 1 << 20])
def test_every_format_gives_every_document_once_for_any_range_size(tmp_path, kind, range_bytes):
    found = rows([make(kind, tmp_path)], range_bytes=range_bytes)
    assert [row["text"] for row in found] == TEXTS
    assert documents(found) == documents(rows([tmp_path / f"in.{kind}"]))


@pytest.mark.parametrize("cut", [AFTER_WORD, ANYWHERE, None])
@pytest.mark.parametrize("range_bytes", [1, 7, 100, 5000])
@pytest.mark.parametrize("text", ["Some words,\nand more. 很好,真的。\n" * 40, "x" * 500, " \n" * 200, "a b"])
def test_a_text_file_is_one_document_however_it_is_cut(tmp_path, cut, range_bytes, text):
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("next")
    found = rows([tmp_path], Format("text", None, None, cut), range_bytes)
    assert documents(found) == {(0, 0): text, (1, 0): "next"}
    assert sum(row["ends"] for row in found) == 2


@pytest.mark.parametrize("block", [1, 2, 3, 5, 16, 100])
@pytest.mark.parametrize("filler", ["x", "好", "-"])
def test_a_cut_is_found_at_the_same_place_whatever_is_read_at_once(tmp_path, monkeypatch, block, filler):
    text = "one two" + filler * 60 + "word，three。" + filler * 60 + "四。end now"
    (tmp_path / "a.txt").write_text(text)
    expected = [documents(rows([tmp_path], range_bytes=size)) for size in (10, 33)]
    pieces = [row["offset"] for row in rows([tmp_path], range_bytes=10)]
    monkeypatch.setattr(parse, "BLOCK", block)
    assert [documents(rows([tmp_path], range_bytes=size)) for size in (10, 33)] == expected
    assert [row["offset"] for row in rows([tmp_path], range_bytes=10)] == pieces
    assert len(pieces) >= 3


@pytest.mark.parametrize("range_bytes", [1, 7, 100, 5000])
def test_a_cut_between_words_leaves_out_the_blank(tmp_path, range_bytes):
    text = "some words and more " * 40 + "end"
    (tmp_path / "a.txt").write_text(text)
    found = rows([tmp_path], Format("text", None, None, BETWEEN_WORDS), range_bytes)
    assert " ".join(row["text"] for row in found) == text
    assert (len(found) > 1) == (range_bytes < 5000)


@pytest.mark.parametrize("separator", ["\n\n", "<|end|>", "x"])
@pytest.mark.parametrize("range_bytes", [1, 10, 64, 5000])
def test_a_separator_divides_a_text_file_alike_for_any_range_size(tmp_path, separator, range_bytes):
    text = separator.join(["one", "two\n", "", "dreißig", "\n", "fünf six"] * 5) + separator
    (tmp_path / "a.txt").write_text(text)
    found = rows([tmp_path / "a.txt"], Format("text", None, separator, AFTER_WORD), range_bytes)
    assert [row["text"] for row in found if row["text"]] == [part for part in text.split(separator) if part]
    assert all(text.encode()[row["offset"] :].decode().startswith(row["text"]) for row in found)


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in [("a.txt", "word"), ("b.jsonl", '{"text": "word"}\n'), ("c.csv", "text\nword\n")]:
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert [row["text"] for row in rows([tmp_path])] == ["word"] * 3


def test_the_last_line_needs_no_newline_and_blank_lines_are_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n\n  \n{"text": "b"}')
    assert [(row["line"], row["text"]) for row in rows([tmp_path])] == [(2, "a"), (5, "b")]


BROKEN = {
    b'{"text": "cut sh': "not JSON: Invalid control character",
    b'["text"]': "not a JSON object but list",
    b'{"body": "x", "id": 3}': "no key 'text'; keys seen: 'body', 'id'",
    b'{"text": 7}': "'text' is int, not a string",
    b'{"text": null}': "'text' is null, not a string",
    b'{"text": "a\\ud800"}': "not UTF-8: lone surrogate U+D800",
    b'{"text": "caf\xe9"}': "not UTF-8: byte 0xe9 at offset",
    b"\xff\xfe{": "not UTF-8: byte 0xff at offset",
    b"[" * 100_000: "not JSON",
    b'{"text": NaN}': "'text' is float, not a string",
}


@pytest.mark.parametrize("range_bytes", [30, 1 << 20])
def test_a_broken_line_becomes_a_reason_and_its_neighbours_stay(tmp_path, range_bytes):
    lines = [part for line in BROKEN for part in (b'{"text": "good"}', line)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = rows([tmp_path], range_bytes=range_bytes)
    assert [row["text"] for row in found[::2]] == ["good"] * len(BROKEN)
    for row, expected in zip(found[1::2], BROKEN.values(), strict=True):
        assert row["text"] is None
        assert row["reason"].startswith(expected)


def test_text_that_is_not_utf8_is_refused_with_place_and_reason(tmp_path):
    (tmp_path / "a.txt").write_bytes("gut\nnöt".encode("latin-1") * 3)
    (tmp_path / "b.txt").write_text("wide", encoding="utf-16")
    (tmp_path / "c.txt").write_text("good")
    (tmp_path / "d.csv").write_bytes(b"text\nfine\nb\xe4d\n")
    pq.write_table(pa.table({"text": pa.array([b"ok", b"b\xe4d"], pa.binary())}), tmp_path / "e.parquet")
    found = rows([tmp_path])
    assert [row["text"] for row in found if row["text"]] == ["good", "fine", "ok"]
    reasons = [(row["line"], row["reason"]) for row in found if row["reason"]]
    assert reasons == [
        (2, "not UTF-8: byte 0xf6 at offset 5"),
        (1, "not UTF-8: byte 0xff at offset 0 (it looks like UTF-16: convert it first)"),
        (3, "not UTF-8: byte 0xe4 at character 1"),
        (0, "not UTF-8: byte 0xe4 at character 1"),
    ]


@pytest.mark.parametrize("cut_at", [1, 2, 3, 4, 5])
def test_the_first_bad_byte_is_found_across_blocks(tmp_path, monkeypatch, cut_at):
    monkeypatch.setattr(parse, "BLOCK", cut_at)
    path = tmp_path / "a.txt"
    for content in ["aä€𝔘".encode(), b"", b"abc"]:
        path.write_bytes(content)
        assert first_bad_byte(path) is None
    for content, place in [(b"a\xc3", 1), ("ä€".encode() + b"\xffx", 5), ("𝔘".encode()[:3] + b"a", 0)]:
        path.write_bytes(content)
        assert first_bad_byte(path) == place


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, kind):
    path = make(kind, tmp_path)
    path.write_bytes(path.read_bytes()[:-15])
    with pytest.raises(DataError, match=f"in.{kind}"):
        rows([path])


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet"])
def test_a_wrong_text_key_names_the_keys_seen(tmp_path, kind):
    source = sources_of(make(kind, tmp_path))[0]
    with pytest.raises(DataError, match=r"no key 'body'; keys seen: 'n', 'text'"):
        refuse_wrong_keys([source], Format("body", None, None, None))


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "csv"])
def test_the_place_in_a_file_that_is_one_stream_is_known(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(parse, "BATCH_ROWS", 1)
    path = make(kind, tmp_path)
    notes, source = Notes(), sources_of(path)[0]
    work = plan_ranges([source], 1 << 20, separator=None, cuttable=True)[0]
    for _ in parse_range(work, {0: source}, PLAIN, notes):
        assert 0 < notes.read_bytes() <= source.size
    assert Notes().read_bytes() == 0


def test_a_parquet_column_of_any_text_type_is_read_and_no_other(tmp_path):
    kinds = [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.string_view(),
    ]
    for number, kind in enumerate(kinds):
        path = tmp_path / f"{number}.parquet"
        column = pa.array(["one", None, "two"], pa.string()).cast(kind)
        pq.write_table(pa.table({"text": column}), path)
        assert [row["text"] or row["reason"] for row in rows([path])] == [
            "one",
            "'text' is null, not a string",
            "two",
        ]
    pq.write_table(pa.table({"text": [1, 2]}), path)
    with pytest.raises(DataError, match="column 'text' is int64, not text"):
        rows([path])


def test_a_delimiter_can_be_chosen(tmp_path):
    (tmp_path / "a.csv").write_text("id;text\n1;a,b\n2\n3;c\n")
    found = rows([tmp_path], Format("text", ";", None, None))
    assert [row["text"] or row["reason"] for row in found] == ["a,b", "1 fields; 'text' is field 2", "c"]
    assert [row["line"] for row in found] == [2, 3, 4]


@pytest.mark.parametrize("limit", [1, 3, 5, 100])
@pytest.mark.parametrize("range_bytes", [1, 60, 1 << 20])
def test_a_limit_takes_the_first_documents(tmp_path, limit, range_bytes):
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name}{n}" if n != 2 else "" for n in range(5)])
    (tmp_path / "c.txt").write_text("the last one " * 20)
    found = rows([tmp_path], range_bytes=range_bytes, limit=limit)
    every = list(documents(rows([tmp_path])).values())
    assert [text for text in documents(found).values() if text] == [text for text in every if text][:limit]


# --- which files ---


def test_folders_and_globs_are_searched_in_sorted_order(tmp_path):
    for name in ["b.txt", "a.txt", "sub/c.jsonl", ".hidden/d.txt", "e.png", "sub/.f.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [os.path.relpath(source.path, tmp_path) for source in sources_of(tmp_path)]
    assert names == ["a.txt", "b.txt", "sub/c.jsonl"]
    assert [s.path for s in sources_of(tmp_path / "*.txt")] == [str(tmp_path / n) for n in ("a.txt", "b.txt")]
    twice = sources_of(tmp_path / "a.txt", tmp_path, tmp_path / "*.txt")
    assert len(twice) == 3


WIKI = '{"id": "1", "text": "An article.\\n"}\n{"id": "2", "text": "Another."}\n'


def test_a_folder_gives_what_looks_like_text_and_counts_the_rest(tmp_path):
    taken = ["README", "a.md", "b.RST", "src/c.py", "src/d.rs", "AA/wiki_00", "AA/e.json"]
    passed = [
        ".git/x.txt",
        "node_modules/y.js",
        "__pycache__/z.py",
        "f.png",
        "g.png",
        ".env",
        "h.pdf",
        "out/rejects.jsonl",
    ]
    for name in [*taken, *passed, "i.py", "package.json", "AA/one.json"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(WIKI if name.startswith("AA") else "plain text")
    (tmp_path / "i.py").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "package.json").write_text('{\n "name": "x"\n}')
    (tmp_path / "AA" / "one.json").write_text('{"name": "x"}')
    (tmp_path / "link").symlink_to(tmp_path / "src")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    sources, counted = find_sources(PrepareOptions((str(tmp_path),), output=tmp_path / "out"))
    assert sorted(os.path.relpath(source.path, tmp_path) for source in sources) == sorted(taken)
    found = {Path(source.path).name: source.kind for source in sources}
    assert found == {
        **dict.fromkeys(["README", "a.md", "b.RST", "c.py", "d.rs"], "text"),
        **dict.fromkeys(["wiki_00", "e.json"], "jsonl"),
    }
    assert counted == {
        "hidden folder": 1,
        "node_modules folder": 1,
        "__pycache__ folder": 1,
        "output folder": 1,
        "hidden file": 1,
        ".png file": 2,
        ".pdf file": 1,
        "binary file": 1,
        "plain JSON file": 2,
        "linked folder": 1,
        "special file": 1,
    }


def test_many_kinds_of_files_are_counted_together():
    counts = Counter({f".{n} file": 1 + (n < 2) for n in range(12)})
    words = in_words(counts).split(", ")
    assert words[:3] == ["2 .0 files", "2 .1 files", "1 .10 file"]
    assert words[-1] == "4 other files"


def test_ext_chooses_a_folders_files_by_their_suffixes(tmp_path):
    for name in ["a.py", "b.MD", "c.txt", "d.log", "e.tar.log", "README"]:
        (tmp_path / name).write_text("x")
    sources, counted = search(tmp_path, ext=("md", ".log"))
    assert [Path(source.path).name for source in sources] == ["b.MD", "d.log", "e.tar.log"]
    assert counted == {".py file": 1, ".txt file": 1, "no-suffix file": 1}
    with pytest.raises(
        DataError, match=r"holds no text files; passed over: 2 \.log files, 1 \.md file, 1 \.py file"
    ):
        search(tmp_path, ext=("tex",))


@pytest.mark.parametrize("name", ["a.py", "b.log", "c", "d.v2", "e.rst"])
def test_a_file_that_is_named_is_taken_as_text(tmp_path, name):
    (tmp_path / name).write_text("{not json\n")
    assert documents(rows([tmp_path / name])) == {(0, 0): "{not json\n"}


@pytest.mark.parametrize(
    "name", ["merged_cleand.json", "wiki_00", "part.json.1", "c4-00001.json.gz", "c4.json.zst", "wiki_01.gz"]
)
@pytest.mark.parametrize("first", ["", "\ufeff", "\n\n"])
def test_json_lines_are_known_by_looking(tmp_path, name, first):
    content = (first + WIKI).encode()
    packed = {"gz": gzip.compress, "st": lambda data: bytes(pa.compress(data, "zstd"))}.get(name[-2:], bytes)
    (tmp_path / name).write_bytes(packed(content))
    assert list(documents(rows([tmp_path / name])).values()) == ["An article.\n", "Another."]


def test_a_parquet_file_is_known_whatever_its_name(tmp_path):
    path = make("parquet", tmp_path).rename(tmp_path / "part-0.of-2")
    assert list(documents(rows([path])).values()) == TEXTS


def test_the_suffixes_in_the_docs_are_those_that_are_taken():
    page = (Path(__file__).parents[2] / "docs" / "prepare.md").read_text()
    listed = page.split("text and source code:\n`")[1].split("`")[0]
    assert set(listed.split()) == kinds.TEXT_SUFFIXES


def test_a_pipe_is_a_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is a pipe or device"):
        sources_of(tmp_path / "pipe")


def test_the_key_of_a_file_with_one_line_decides_whether_it_is_json_lines(tmp_path):
    (tmp_path / "one").write_text('{"body": "x"}')
    assert [search(tmp_path / "one", text_key=key)[0][0].kind for key in ("body", "text")] == [
        "jsonl",
        "text",
    ]


def test_a_folder_that_cannot_be_read_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")

    def scandir(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        sources_of(tmp_path)


def test_stdlib_is_real_text_on_every_machine(tmp_path):
    found, _ = find_sources(PrepareOptions(("stdlib",), tmp_path))
    assert sum(source.size for source in found) > 10_000_000
    assert all(first_bad_byte(Path(source.path)) is None for source in found)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("nosuch.txt", None, "there is no file or folder"),
        ("empty.txt", "", "there is no text in .*empty.txt: 1 file, all empty"),
        ("folder", None, "holds no text files"),
        ("*.md", None, "no file matches"),
        ("picture.png", "x\0", "picture.png is a binary file: byte 1 is zero"),
        ("letter.tex", "\ufeffx".encode("utf-16-le").decode("latin-1"), r"zero \(it looks like UTF-16\)"),
        (
            "packed.txt.gz",
            gzip.compress(b"text", mtime=0).decode("latin-1"),
            "packed.txt.gz is compressed and holds no",
        ),
        (
            "cut.json.gz",
            gzip.compress(b'{"text": "x"}', mtime=0)[:-9].decode("latin-1"),
            "is compressed and holds no",
        ),
        ("array.json", '[{"text": "x"}, {"text": "y"}]', "array.json is not JSON lines"),
        ("long.json", '{\n "text": "x"\n}', "long.json is not JSON lines: one object a line"),
        ("other.json", '{"body": "x"}', "with the text under 'text'"),
        ("empty.json", "", "empty.json is not JSON lines"),
    ],
)
def test_an_input_without_text_is_a_sentence(tmp_path, name, content, text):
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=text):
        sources_of(tmp_path / name)


def test_a_misspelt_name_gets_the_nearest(tmp_path):
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(InputError) as error:
        sources_of(tmp_path / "corpsu.txt")
    assert "did you mean 'corpus.txt'?" in error.value.hint


def test_a_file_in_two_splits_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match="among the main and the test files"):
        sources_of(tmp_path, test=(str(tmp_path / "a.txt"),))
