"""Preparations by a chain of stages with their real processes: kills, workers, Ray, a web server."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time

import pytest
from rich.console import Console

from shoal.data.prepare import run
from shoal.data.prepare.options import PrepareOptions
from tests.data import corpus as planted
from tests.data.web_server import serving

DRIVER = """
import sys
from shoal.cli.app import main
from shoal.data.prepare import steps
steps.range_size = lambda sources: 20_000
sys.argv = ["shoal", "prepare", *sys.argv[1:]]
main()
"""


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
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_the_bytes_do_not_depend_on_the_number_of_workers(corpus, whole, tmp_path):
    run.prepare(options(corpus, tmp_path / "d", workers=3, range_bytes=30_000), Console(quiet=True))
    assert planted.content(tmp_path / "d") == whole


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.proof, pytest.mark.timeout(1800)])])
def test_kills_at_any_time_cost_nothing(corpus, whole, tmp_path, kills):
    output, draw, killed, longest = tmp_path / "d", random.Random(kills), 0, 4.0
    for _ in range(kills):
        process = start(corpus, output)
        try:
            process.wait(draw.uniform(0.3, longest))  # less than a whole run takes
        except subprocess.TimeoutExpired:
            process.kill()
            killed += 1
        process.communicate()
        if (output / "manifest.json").exists():
            assert planted.content(output) == whole
            output = tmp_path / f"d{killed}"
    process = start(corpus, output)
    printed = process.communicate(timeout=240)[0]
    assert process.returncode == 0, printed
    assert planted.content(output) == whole
    assert killed > kills / 3


def test_lists_of_urls_become_a_dataset_also_after_a_kill(tmp_path):
    """Pages from a real server on loopback, which has to be allowed."""
    (tmp_path / "stages.toml").write_text(
        '[fetch]\nallow_private = true\ndelay = 0\n[extract]\n[length]\ntokenizer = "bytes"\nmin_tokens = 5\n'
    )
    with serving() as server:
        urls = [server.url(f"/large/{n}") for n in range(60)] + [
            server.url("/missing"),
            server.url("/binary"),
        ]
        (tmp_path / "urls.txt").write_text("\n".join(urls))
        arguments = [
            "--urls",
            tmp_path / "urls.txt",
            "--stages",
            tmp_path / "stages.toml",
            "--split",
            "8,1,1",
        ]
        arguments += ["--tokenizer", "bytes", "--output", tmp_path / "d"]
        command = [sys.executable, "-m", "shoal", "prepare", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while process.poll() is None and not server.requests()["/large/5"]:
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert process.returncode == -9
        done = subprocess.run(command, capture_output=True, text=True, check=False)
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
        command = [sys.executable, "-m", "shoal", "explain", str(tmp_path / "d"), url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert words in done.stdout, done.stderr
