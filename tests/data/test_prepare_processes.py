"""`prepare` with its real worker processes: same bytes, prompt stops, kills at any time."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli.app import app
from shoal.data.prepare import engine, run
from shoal.data.prepare.options import PrepareOptions
from shoal.errors import DataError, ShoalError

DRIVER = """
import json, sys
from pathlib import Path
from shoal.cli.app import main
from shoal.data.prepare import engine, run
run.range_size = lambda sources: 30_000
sys.argv = ["shoal", "prepare", *json.loads(sys.argv[1])]
main()
"""


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
    arguments = [str(corpus), "--output", str(output), "--vocab-size", "500", "--workers", str(workers)]
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_ranges(output, number, process):
    """Wait until `number` ranges are committed."""
    until = time.monotonic() + 120
    while len(list(output.glob(".work/*/ranges/*.json"))) < number:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_bytes_do_not_depend_on_the_number_of_workers(corpus, whole, tmp_path):
    run.prepare(options(corpus, tmp_path / "d", workers=3, range_bytes=100_000), Console(quiet=True))
    assert content(tmp_path / "d") == whole


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.proof), signal.SIGTERM, signal.SIGHUP]
)
def test_a_signal_stops_at_once_with_75_and_the_next_run_continues(corpus, whole, tmp_path, number):
    output = tmp_path / "d"
    process = start(corpus, output)
    wait_for_ranges(output, 2, process)
    process.send_signal(number)
    sent = time.monotonic()
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 75, printed
    assert time.monotonic() - sent < 20  # a second or two where the machine is free
    assert f"stopped by {number.name}; what is done is kept" in printed
    assert [p.name for p in output.iterdir()] == [".work"]
    again = start(corpus, output)
    printed = again.communicate(timeout=120)[0]
    assert again.returncode == 0, printed
    assert "ranges were done before" in printed
    assert content(output) == whole


def test_kills_at_any_time_cost_nothing(corpus, whole, tmp_path):
    output, draw, kills = tmp_path / "d", random.Random(5), 0
    for done in (0, 0, 1, 10, 25, 40, 60):  # committed ranges of about 75, then a little later
        process = start(corpus, output)
        while process.poll() is None and len(list(output.glob(".work/*/ranges/*.json"))) < done:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.1 if done else 1.5))
        kills += process.poll() is None
        process.kill()
        process.communicate()
        visible = {p.name for p in output.iterdir()} - {".work"} if output.exists() else set()
        assert not visible or "manifest.json" in visible
    process = start(corpus, output)
    assert process.wait(timeout=120) == 0, process.communicate()[0]
    assert content(output) == whole
    assert kills >= 4


def outside(folder):
    """List what lies in a temporary folder, and our own names in shared memory."""
    shared = Path("/dev/shm")
    names = (
        [p.name for p in shared.iterdir() if not p.name.startswith(("psm_", "sem."))]
        if shared.is_dir()
        else []
    )
    return {*(str(p) for p in folder.rglob("*")), *names}


def test_what_a_kill_leaves_outside_of_the_output_is_gone_after_the_next_start(
    corpus, whole, tmp_path, monkeypatch
):
    temporary, output = tmp_path / "tmp", tmp_path / "d"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = outside(temporary)
    process = start(corpus, output)
    while not list(output.glob(".work/*/ranges/worker-*")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.kill()
    process.communicate()
    left = outside(temporary) - before
    assert any("shoal-" in name for name in left)
    planted = Path("/dev/shm") / f"{next(temporary.glob('shoal-*')).name.removeprefix('shoal-')}0a0a"
    planted.write_bytes(b"a batch that nobody reads")
    process = start(corpus, output)
    assert process.wait(timeout=180) == 0, process.communicate()[0]
    assert outside(temporary) == before
    assert content(output) == whole


def test_shared_memory_of_the_engine_has_a_name_of_ours(monkeypatch, tmp_path):
    script = (
        "from shoal.data.prepare import engine; from multiprocessing import shared_memory; "
        "engine._name_shared_memory(); s = shared_memory.SharedMemory(create=True, size=8); print(s.name); "
        "s.close(); s.unlink()"
    )
    folder = tmp_path / "shoal-ab12cd_9"
    folder.mkdir()
    env = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"ab12cd_9[0-9a-f]{4}\n", done.stdout)


def test_only_folders_that_name_this_work_as_theirs_are_removed(tmp_path):
    root, theirs, ours = (tmp_path / name for name in ("work", "shoal-training", "shoal-ab12cd_9"))
    for folder in (root, theirs, ours):
        folder.mkdir()
    (ours / "owner").write_text(str(root))
    (theirs / "owner").write_text(str(tmp_path / "other"))
    for named in (tmp_path / "photos", theirs, ours):
        named.mkdir(exist_ok=True)
        (root / "scratch").write_text(str(named))
        engine.remove_leftovers(root)
        assert named.exists() == (named != ours)
        assert not (root / "scratch").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_a_note_that_is_no_file_is_not_read(tmp_path, make):
    make(tmp_path / "scratch")
    engine.remove_leftovers(tmp_path)


def test_a_dead_worker_is_told_and_the_next_run_continues(corpus, whole, tmp_path):
    output = tmp_path / "d"
    process = start(corpus, output)
    wait_for_ranges(output, 1, process)
    worker = next(iter(output.glob(".work/*/ranges/worker-*")))
    os.kill(int(worker.name.split("-")[1]), signal.SIGKILL)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 1, printed
    assert "a worker process died" in printed
    assert start(corpus, output).wait(timeout=120) == 0
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


def test_the_engines_usage_reporting_is_off_before_its_import(corpus, tmp_path, monkeypatch):
    """A stand-in for Daft, first on the path, writes down what it would see."""
    (tmp_path / "daft.py").write_text(
        "import json, os\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(dict(os.environ)))\n"
        "raise SystemExit('not the real one')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ShoalError, match="engine failed; what was done is kept:\nnot the real one"):
        run.prepare(options(corpus, tmp_path / "d", tokenizer="bytes", vocab_size=None), Console(quiet=True))
    seen = json.loads((tmp_path / "seen").read_text())
    assert (seen["DO_NOT_TRACK"], seen["DAFT_ANALYTICS_ENABLED"]) == ("1", "0")
    assert "daft" not in sys.modules


def test_an_engine_that_is_not_installed_is_a_sentence(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "daft", None)
    with pytest.raises(ShoalError, match="needs Daft") as error:
        run.prepare(options(corpus, tmp_path / "d", tokenizer="bytes", vocab_size=None), Console(quiet=True))
    assert error.value.hint == "pip install 'shoal[data]'"


def test_a_dead_worker_that_the_engine_does_not_notice_is_told_too(tmp_path, monkeypatch):
    """Daft has been seen waiting for a dead worker for ever: silence and a lock that is free mean death."""
    monkeypatch.setattr(engine, "_DEATH_S", 0.3)
    (tmp_path / "worker-1").write_text("12")  # nobody holds its lock
    reader, writer = os.pipe()
    with pytest.raises(ShoalError, match="a worker process died"):
        list(engine._results(reader, tmp_path))
    os.write(writer, b'{"index": 1}\n\n')
    assert list(engine._results(reader, tmp_path)) == [{"index": 1}]
    os.close(reader)
    os.close(writer)


def test_a_worker_that_takes_its_lock_late_and_is_then_silent_is_not_dead(tmp_path, monkeypatch):
    """The lock was free for a moment; then a range takes longer than a dead worker would be waited for."""
    monkeypatch.setattr(engine, "_DEATH_S", 0.3)
    monkeypatch.setattr(engine, "_POLL_S", 0.05)
    reader, writer = os.pipe()
    with (tmp_path / "worker-1").open("w") as file:
        found = engine._results(reader, tmp_path)
        assert next(found) == {"partial_bytes": 0}
        assert next(found) == {"partial_bytes": 0}  # by now it was seen without its lock
        fcntl.flock(file, fcntl.LOCK_EX)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert next(found) == {"partial_bytes": 0}
    os.close(reader)
    os.close(writer)


def test_a_worker_is_seen_only_with_its_lock(tmp_path, monkeypatch):
    seen = []
    honest = fcntl.flock

    def lock(file, how):
        seen.append(list(tmp_path.glob("worker-*")))
        honest(file, how)

    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr(engine, "_name_shared_memory", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(engine, "WorkSpec", lambda **fields: type("Spec", (), fields))
    job = engine._Job(json.dumps({"folder": str(tmp_path)}), os.getppid())
    assert seen == [[]]
    assert engine._any_worker(tmp_path, alive=True)
    job._alive.close()
