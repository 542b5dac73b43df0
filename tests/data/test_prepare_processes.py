"""`prepare` with its real worker processes: same bytes, prompt stops, kills at any time."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli.app import app
from shoal.data.prepare import engine, run
from shoal.data.prepare.options import PrepareOptions
from shoal.errors import DataError, ShoalError
from tests import commands

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 2 MB of JSONL and text."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randrange(2, 9))) for _ in range(3000)]
    with (folder / "a.jsonl").open("w") as file:
        for n in range(1500):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=150))}) + "\n")
            if n % 700 == 0:
                file.write("broken\n")
    (folder / "b.txt").write_text(" ".join(draw.choices(words, k=60_000)))
    return folder


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The dataset of an undisturbed run, as {name: bytes}."""
    path = tmp_path_factory.mktemp("whole") / "dataset"
    run.prepare(options(corpus, path, workers=1, range_bytes=500_000), Console(quiet=True))
    return content(path)


def options(corpus, output, **changes):
    return PrepareOptions((str(corpus),), output, **{"vocab_size": 500, **changes})


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def start(corpus, output, workers=2):
    arguments = [corpus, "--output", output, "--vocab-size", "500", "--workers", workers]
    return commands.Command("prepare", *arguments, env={"RANGE_BYTES": "30000"})


def wait_for_ranges(output, number, process):
    """Wait until `number` ranges are committed."""
    until = time.monotonic() + 120
    while len(list(output.glob(".work/*/ranges/*.json"))) < number:
        assert process.poll() is None, process.said()
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_bytes_do_not_depend_on_the_number_of_workers(corpus, whole, tmp_path):
    run.prepare(options(corpus, tmp_path / "d", workers=3, range_bytes=100_000), Console(quiet=True))
    assert content(tmp_path / "d") == whole


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.proof) for one in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_stops_at_once_with_75_and_the_next_run_continues(corpus, whole, tmp_path, number):
    output = tmp_path / "d"
    process = start(corpus, output)
    wait_for_ranges(output, 2, process)
    process.send_signal(number)
    sent = time.monotonic()
    done = process.end()
    printed = done.stdout + done.stderr
    assert done.returncode == 75, printed
    assert time.monotonic() - sent < 20  # a second or two where the machine is free
    assert f"stopped by {number.name}; what is done is kept" in printed
    assert [p.name for p in output.iterdir()] == [".work"]
    again = start(corpus, output).end(timeout=120)
    assert again.returncode == 0, again
    assert "ranges were done before" in again.stdout + again.stderr
    assert content(output) == whole


@pytest.mark.parametrize("ranges", [(0, 25), pytest.param((0, 1, 25, 60), marks=pytest.mark.proof)])
def test_kills_at_any_time_cost_nothing(corpus, whole, tmp_path, ranges):
    output, draw, killed = tmp_path / "d", random.Random(5), []
    for done in ranges:  # committed ranges of about 75, then a little later
        process = start(corpus, output)
        while process.poll() is None and len(list(output.glob(".work/*/ranges/*.json"))) < done:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.1 if done else 1.5))
        killed += [done] * (process.poll() is None)
        process.kill()
        process.end()
        visible = {p.name for p in output.iterdir()} - {".work"} if output.exists() else set()
        assert not visible or "manifest.json" in visible
    done = start(corpus, output).end(timeout=120)
    assert done.returncode == 0, done
    assert content(output) == whole
    assert 25 in killed
    assert len(killed) >= len(ranges) - 1


def workers_of(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_a_kill_leaves_nothing_outside_of_the_output_and_no_process(corpus, tmp_path, monkeypatch):
    temporary, output = tmp_path / "tmp", tmp_path / "d"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = start(corpus, output)
    wait_for_ranges(output, 1, process)
    workers = workers_of(process)
    process.kill()
    process.end()
    assert len(workers) == 2
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not list(temporary.iterdir())


def test_a_dead_worker_is_told_and_the_next_run_continues(corpus, whole, tmp_path):
    output = tmp_path / "d"
    process = start(corpus, output)
    wait_for_ranges(output, 1, process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    done = process.end()
    assert done.returncode == 1, done
    assert "a worker process died" in done.stdout + done.stderr
    assert start(corpus, output).end(timeout=120).returncode == 0
    assert content(output) == whole


def test_a_workers_error_is_the_callers(tmp_path):
    good = b"".join(json.dumps({"text": f"line {n}"}).encode() + b"\n" for n in range(2000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(good)[:-20])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read to its end"):
        run.prepare(PrepareOptions((str(tmp_path),), tmp_path / "d", "bytes"), Console(quiet=True))


def test_a_full_disk_in_a_worker_is_a_sentence(corpus, small_disk):
    with pytest.raises(ShoalError, match="the disk is full: cannot write"):
        run.prepare(
            options(corpus, small_disk / "d", tokenizer="bytes", vocab_size=None), Console(quiet=True)
        )
    assert [p.name for p in (small_disk / "d").iterdir()] == [".work"]


def test_the_command_prints_a_table_and_writes_json(corpus, tmp_path, capsys):
    output = str(tmp_path / "d")
    arguments = [str(corpus), "--output", output, "--tokenizer", "bytes", "--json", str(tmp_path / "j.json")]
    app(["prepare", *arguments], result_action="return_value")
    printed = capsys.readouterr().out
    for word in ("documents", "tokens", "train", "validation", "test", "MB/s", "rejected 3", "vocabulary"):
        assert word in printed
    record = json.loads((tmp_path / "j.json").read_text())
    assert record["manifest"]["counters"]["documents_kept"] == 1501
    assert record["seconds"] > 0


def test_help_teaches_with_examples(capsys):
    app(["prepare", "--help"], result_action="return_value")
    printed = capsys.readouterr().out
    assert "Example: shoal prepare stdlib --output datasets/stdlib" in printed
    assert "--max-rejected-share" in printed


def run_all(opened, job, items):
    with opened:
        return list(opened.run(job, items))


def test_the_same_processes_do_one_job_after_the_other_and_end_with_the_context(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    job = engine.Job("tests.data.jobs:Who", {})
    with engine.Engine(tmp_path, 2) as opened:
        first, second = ({one["pid"] for one in opened.run(job, [{}] * 6) if "pid" in one} for _ in range(2))
        assert first == second
        with pytest.raises(DataError, match="this one fails"):
            list(opened.run(job, [{}, {"fail": True}, {}]))
        assert not first & {one["pid"] for one in opened.run(job, [{}] * 2) if "pid" in one}
        last = opened._processes[0]._process.pid
    assert not Path(f"/proc/{last}").exists()


def test_a_worker_that_ends_by_itself_is_told_in_its_own_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    job = engine.Job("tests.data.jobs:Broken", {})
    with pytest.raises(ShoalError, match="a worker process failed; what was done is kept:\nthis library is"):
        run_all(engine.Engine(tmp_path, 1), job, [{}])
