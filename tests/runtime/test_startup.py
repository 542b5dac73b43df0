"""The first moments of a command, by real processes: it says what it does, and a stop request is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import commands
from tests.cases import every
from tests.tiny_dataset import random_dataset

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LOADING = b"loading torch"


class Started:
    """`python -m shoal ARGUMENTS`, whose errors are read as they come."""

    def __init__(self, *arguments: object, **options: bool) -> None:
        command = [sys.executable, "-m", "shoal", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, **options
        )
        self.errors = b""

    def wait_for_handlers(self) -> None:
        """Return when SIGTERM is caught: Python itself takes its time before our first line."""
        status = Path(f"/proc/{self.process.pid}/status")
        while not int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
            time.sleep(0.002)

    def wait_for_word(self) -> None:
        """Return when it says what it does."""
        while LOADING not in self.errors:
            more = os.read(self.process.stderr.fileno(), 1 << 16)
            assert more, self.errors
            self.errors += more

    def wait(self, moment: float | str) -> None:
        """Wait so many seconds, or for "the word", or for "the word and" so many seconds."""
        if isinstance(moment, str):
            self.wait_for_word()
            moment = 0 if moment == "the word" else float(moment.split()[-1])
        time.sleep(moment)

    def end(self) -> tuple[int, str]:
        """Return its exit status and what it said."""
        try:
            self.errors += self.process.communicate(timeout=120)[1]
        finally:
            self.process.kill()
        return self.process.returncode, self.errors.decode()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "random"
    random_dataset(folder)
    return folder


def alive(run_dir: Path) -> list[str]:
    """List the processes, other than zombies, whose command line names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(run_dir).encode() in (path / "cmdline").read_bytes():
                found.append(path.name)
        except OSError:
            continue
    return found


def no_orphans(run_dir: Path) -> bool:
    """Wait a while for every process of a run to be gone."""
    until = time.monotonic() + 20
    while alive(run_dir) and time.monotonic() < until:
        time.sleep(0.1)
    return not alive(run_dir)


MOMENTS = [0, 0.1, 0.3, 0.6, 1.0, 1.5, "the word", "the word and 1.5"]
STOPS = [
    # Each moment once, numbers of processes and signals in turn; the rest is for `make proof`.
    pytest.param(
        number, nproc, after_s, marks=[pytest.mark.proof] * ((at + nproc) % 2 or (at // 2 + number) % 2)
    )
    for at, after_s in enumerate(MOMENTS)
    for nproc in (1, 2)
    for number in (signal.SIGTERM, signal.SIGINT)
]


@pytest.mark.parametrize(("number", "nproc", "after_s"), STOPS)
def test_a_stop_at_any_moment_of_a_start_is_a_sentence_and_75(tmp_path, data, number, nproc, after_s):
    run_dir = tmp_path / "run"
    started = Started("train", "tiny", "--data", data, "--run-dir", run_dir, "--nproc", nproc)
    started.wait_for_handlers()
    started.wait(after_s)
    started.process.send_signal(number)
    status, said = started.end()
    assert status == 75, said
    assert "Traceback" not in said
    if not list(run_dir.glob("checkpoints/step-*")):  # a fast machine may be at its first step by then
        assert f"{number.name}: stopped before the first step; nothing to save" in said
    assert no_orphans(run_dir)


@pytest.mark.parametrize(
    ("number", "status", "after_s"),
    [
        pytest.param(number, status, after_s, marks=[pytest.mark.proof] * ((at + number) % 2))
        for at, after_s in enumerate([0, 0.2, 0.4, "the word", "the word and 0.3"])
        for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130))
    ],
)
def test_a_command_with_nothing_to_resume_says_which_signal_stopped_it(tmp_path, number, status, after_s):
    started = Started("parity", "tiny", "--layouts", "dp2")
    started.wait_for_handlers()
    started.wait(after_s)
    started.process.send_signal(number)
    ended, said = started.end()
    assert (ended, said.removeprefix("loading torch …\n")) == (status, f"stopped by {number.name}\n")


LAUNCHING = """
import os, signal, sys
from shoal.runtime import startup

startup.install_stop_handlers()
sys.argv = ["shoal", "train"]
os.environ[startup.LAUNCHED] = str(os.getpid() + int(sys.stdin.read()))
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(("other", "status", "words"), [(0, 75, "nothing to save"), (1, 143, "")])
def test_a_launcher_that_is_about_to_start_its_workers_tells_that_it_stops(other, status, words):
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHING], input=str(other), capture_output=True, text=True, check=False
    )
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr


SWALLOWED = """
import os, signal, sys
from shoal.runtime import startup

startup.install_stop_handlers()
sys.argv = ["shoal", "parity"]
try:
    with startup.loading():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            pass
except startup.Stopped as stopped:
    sys.exit(f"stopped by {stopped}")
"""


def test_a_stop_that_a_library_swallowed_ends_the_command_once_all_is_loaded():
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, check=False)
    assert done.stderr == "loading torch …\nstopped by SIGTERM\n"


DROPPED = """
import os, signal, weakref
from shoal.runtime import startup

startup.install_stop_handlers()
weakref.finalize(set(), os.kill, os.getpid(), signal.SIGTERM)
print("goes on")
"""


def test_a_stop_that_python_drops_in_a_callback_ends_the_command_at_once():
    """As those of its import system, for weak references to locks."""
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "stopped by SIGTERM\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_preparing_that_has_not_begun_ends_with_75(tmp_path, number):
    started = Started("prepare", "stdlib", "--output", tmp_path / "made")
    started.wait_for_handlers()
    started.process.send_signal(number)
    status, said = started.end()
    assert status == 75
    assert f"{number.name}: stopped before anything was done" in said


def test_a_signal_that_is_ignored_stays_so():
    script = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from shoal.runtime import startup; "
        "startup.install_stop_handlers(); print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_signals_are_heard_before_anything_large_is_loaded():
    script = (
        "import sys, shoal.__main__; print({'cyclopts', 'pydantic', 'rich', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("nproc", "words"), every(2, [(1, "loading torch …"), (2, "starting 2 workers, loading torch …")])
)
def test_a_start_says_once_what_it_does_and_on_stderr_only(tmp_path, data, nproc, words):
    command = ["train", "tiny", "--data", data, "--run-dir", tmp_path / "run", "--nproc", nproc]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *map(str, command), "--train.steps", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == f"{words}\n"
    assert "loading" not in done.stdout


def seconds_until_the_first_word(data):
    """Return the processor time of `shoal train` until then, which is all that a quiet machine takes."""
    started = Started("train", "tiny", "--data", data, "--nproc", "2")
    started.wait_for_word()
    used = Path(f"/proc/{started.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    started.process.kill()
    started.end()
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def test_the_first_words_come_within_half_a_second(data):
    """Or, on a slow machine, in twice the time of the smallest program of the same library."""
    ours, smallest = [], []
    for _ in range(5):  # others may share the core
        ours.append(seconds_until_the_first_word(data))
        if ours[-1] < 0.5:
            return
        smallest.append(commands.processor_seconds("-c", commands.SMALLEST))
        if len(ours) > 2 and min(ours) < 2 * min(smallest):
            return
    raise AssertionError((ours, smallest))


def test_what_takes_no_time_says_nothing(tmp_path):
    started = Started("train", "no-such-preset")
    status, said = started.end()
    assert (status, LOADING.decode() in said) == (2, False)
    assert Started("--help").end() == (0, "")
