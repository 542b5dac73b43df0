"""Preparations by a chain of stages with their real processes: kills, workers, Ray, a web server."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from benchmarks import large_corpus
from benchmarks.tokenise import prepare
from shoal.data.prepare import run
from shoal.data.prepare.options import PrepareOptions
from tests import commands
from tests.data import corpus as planted
from tests.data.web_archive import response
from tests.data.web_server import serving


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return planted.write(tmp_path_factory.mktemp("corpus"), 800)


def options(corpus, output, **changes):
    chosen = {"stages": corpus / "stages.toml", "vocab_size": 400, "split": "8,1,1", **changes}
    return PrepareOptions((str(corpus / "a.jsonl"),), output, **chosen)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The dataset of an undisturbed run, as {name: bytes}."""
    path = tmp_path_factory.mktemp("whole") / "dataset"
    run.prepare(options(corpus, path, workers=1, range_bytes=300_000), Console(quiet=True))
    return planted.content(path)


def start(corpus, output):
    arguments = [corpus / "a.jsonl", "--stages", corpus / "stages.toml", "--output", output]
    arguments += ["--vocab-size", "400", "--split", "8,1,1", "--workers", "2"]
    return commands.Command("prepare", *arguments, env={"RANGE_BYTES": "20000"})


@pytest.mark.proof
def test_the_bytes_do_not_depend_on_the_number_of_workers(corpus, whole, tmp_path):
    run.prepare(options(corpus, tmp_path / "d", workers=3, range_bytes=30_000), Console(quiet=True))
    assert planted.content(tmp_path / "d") == whole


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_ranges_of_1_8_and_64_megabytes_give_the_same_bytes(tmp_path):
    corpus = planted.write(tmp_path / "corpus", 90_000)
    assert (corpus / "a.jsonl").stat().st_size > 64_000_000
    outputs = []
    for megabytes in (1, 8, 64):
        outputs.append(tmp_path / f"d{megabytes}")
        chosen = options(corpus, outputs[-1], workers=2, range_bytes=megabytes * 1_000_000)
        run.prepare(chosen, Console(quiet=True))
    assert planted.content(outputs[0]) == planted.content(outputs[1]) == planted.content(outputs[2])


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_kills_at_any_time_cost_nothing(corpus, whole, tmp_path):
    draw, killed = random.Random(50), 0
    outputs = (tmp_path / f"d{number}" for number in itertools.count())
    for _ in range(2):  # the first command waits for the process that commands are forked from
        began = time.monotonic()
        assert start(corpus, next(outputs)).end(timeout=240).returncode == 0
        took = time.monotonic() - began
    output = next(outputs)
    while killed < 50:
        process = start(corpus, output)
        try:
            done = process.end(draw.uniform(0.1, took))
        except subprocess.TimeoutExpired:
            done, killed = process.end(), killed + 1
        assert done.returncode in (0, -9), done
        if done.returncode == 0:
            assert planted.content(output) == whole
            output = next(outputs)
    assert start(corpus, output).end(timeout=240).returncode == 0
    assert planted.content(output) == whole


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_memory_does_not_grow_with_the_corpus(monkeypatch, tmp_path):
    monkeypatch.setattr(large_corpus, "FILE_MB", 8)
    (tmp_path / "stages.toml").write_text(large_corpus.STAGES)
    options = ("--stages", str(tmp_path / "stages.toml"), "--max-memory", "100MB", "--tokenizer", "bytes")
    peaks = []
    for files in (2, 10):
        source = tmp_path / f"{files}"
        source.mkdir()
        for number in range(files):
            large_corpus.write_file((source / f"{number}.jsonl", number))
        peaks.append(prepare(source, tmp_path / f"dataset{files}", *options)["peak_bytes"])
    assert peaks[1] < peaks[0] + 40_000_000  # the text in memory would add 64 MB, and more


WHOLE_CHAIN = """
[extract]
[repair]
[language]
[length]
tokenizer = "estimate"
min_tokens = 30
[quality]
min_words = 20
[mask]
[dedup]
paragraphs = true
[decontaminate]
files = ["EVALUATION"]
"""


def write_pages_and_texts(folder):
    """Write web archives, a page and JSON lines in several languages."""
    folder.mkdir()
    kinds = json.loads((Path(__file__).parent / "clean_texts.json").read_text())
    texts = [
        text for name in ("english", "chinese", "japanese", "thai", "others", "code") for text in kinds[name]
    ]
    draw = random.Random(4)
    for number in range(3):
        pages = []
        for n in range(12):
            text = texts[(number * 12 + n) % len(texts)]
            words = " ".join(f"number{draw.randrange(10**6)}" for _ in range(12))
            parts = "".join(f"<p>{part}</p>" for part in (text, text[::-1], f"{words} a@b.org"))
            body = f"<html><body><article>{parts}</article></body></html>"
            pages.append(response(f"https://example.org/{number}/{n}", body.encode()))
        (folder / f"{number}.warc.gz").write_bytes(b"".join(map(gzip.compress, pages)))
    (folder / "page.html").write_text(f"<html><body><p>{kinds['english'][0]}</p></body></html>")
    with (folder / "texts.jsonl").open("w") as out:
        for n in range(200):
            text = "\n".join(draw.sample(texts, 2)) + f" The {n} of {draw.randrange(10**9)} is in it."
            out.write(json.dumps({"text": text if n % 9 else "lorem ipsum " * 40}) + "\n")
    (folder.parent / "evaluation.txt").write_text(kinds["english"][1])
    stages = WHOLE_CHAIN.replace("EVALUATION", str(folder.parent / "evaluation.txt"))
    (folder.parent / "stages.toml").write_text(stages)


def test_all_stages_on_pages_and_texts_give_the_same_bytes_for_any_ranges_and_workers(tmp_path):
    write_pages_and_texts(tmp_path / "input")
    for name, workers, range_bytes in (("one", 1, 1_000_000), ("many", 3, 5_000)):
        made = PrepareOptions(
            (str(tmp_path / "input"),), tmp_path / name, "bytes", split="8,1,1", workers=workers,
            stages=tmp_path / "stages.toml", range_bytes=range_bytes,
        )  # fmt: skip
        dataset = run.prepare(made, Console(quiet=True))
    assert planted.content(tmp_path / "one") == planted.content(tmp_path / "many")
    lineage = {record["stage"]: record.get("counters") for record in dataset.manifest["lineage"]}
    assert lineage["read"]["documents"] == 237
    assert all(lineage[name]["dropped"] for name in ("quality", "dedup", "decontaminate"))
    rows = pq.read_table(tmp_path / "one/stages/documents.parquet").to_pylist()
    assert {"en", "zh", "ja", "th"} <= {row["language"] for row in rows if row["stage"] is None}


def test_lists_of_urls_become_a_dataset_also_after_a_kill(tmp_path):
    """Pages from a real server on loopback, which has to be allowed."""
    (tmp_path / "stages.toml").write_text(
        '[fetch]\nallow_private = true\ndelay = 0\n[extract]\n[length]\ntokenizer = "bytes"\nmin_tokens = 5\n'
    )
    with serving() as server:
        urls = [server.url(f"/large/{n}") for n in range(60)]
        urls += [server.url("/missing"), server.url("/binary")]
        (tmp_path / "urls.txt").write_text("\n".join(urls))
        arguments = ["--urls", tmp_path / "urls.txt", "--stages", tmp_path / "stages.toml"]
        arguments += ["--split", "8,1,1", "--tokenizer", "bytes", "--output", tmp_path / "d"]
        process = commands.Command("prepare", *arguments)
        while process.poll() is None and not server.requests()["/large/5"]:
            time.sleep(0.01)
        process.kill()
        assert process.end().returncode == -9
        done = commands.run("prepare", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        server_saw = server.requests()
    manifest = json.loads((tmp_path / "d/manifest.json").read_text())
    stages = {record["stage"]: record.get("counters") for record in manifest["lineage"]}
    assert stages["links"] == {"documents": 62, "dropped": 0, "reasons": {}}
    assert (stages["fetch"]["documents"], stages["fetch"]["dropped"]) == (62, 2)
    twice = [n for n in range(60) if server_saw[f"/large/{n}"] > 1]
    assert len(twice) <= 2  # those that were in flight when the kill came
    assert manifest["counters"]["documents_read"] == 60
    assert list((tmp_path / "d/pages").glob("*.warc.gz"))
    assert os.path.getsize(tmp_path / "d/train.bin")
    for url, words in ((urls[-2], "dropped by fetch: HTTP 404"), (urls[3], " tokens from token ")):
        done = commands.run("explain", tmp_path / "d", url)
        assert words in done.stdout, done.stderr
