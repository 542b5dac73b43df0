"""Processes forked from one that has loaded everything: whose they are, how they end, what replaces it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launch import forking
from tests.launch.processes import alive, children
from tests.train.commands import Running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are started anew")


def test_a_forked_command_is_a_child_in_a_session_of_its_own(data, tmp_path):
    running = Running(data, tmp_path, "--train.steps", "100000")
    running.wait_for_step(1)
    pid = running.process.pid
    assert running.pid(0) == pid
    assert pid in children(os.getpid())
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGKILL)
    assert running.end()[0] == -signal.SIGKILL


def ignored(pid):
    """Return the signals that a process ignores."""
    text = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    return {number for number in signal.Signals if int(text, 16) >> (number - 1) & 1}


def test_a_signal_that_is_ignored_stays_so_and_the_others_are_heard(data, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        running = Running(data, tmp_path, "--train.steps", "100000")
    finally:
        signal.signal(signal.SIGHUP, before)
    running.wait_for_step(1)
    assert ignored(running.process.pid) & {signal.SIGHUP, signal.SIGTERM, signal.SIGINT} == {signal.SIGHUP}


def gone(theirs):
    theirs.close()


def cannot_fork(theirs):
    theirs.send(None)


@pytest.mark.parametrize("server", [gone, cannot_fork])
def test_a_new_python_is_started_where_the_server_cannot_help(tmp_path, monkeypatch, server):
    ours, theirs = multiprocessing.Pipe()
    server(theirs)
    monkeypatch.setattr(forking, "_server", ours)
    with (tmp_path / "screen").open("wb") as screen:
        child = forking.start(["checkpoint", "ls", "nowhere"], os.environ, screen.fileno(), screen.fileno())
        assert child.wait(60) == 2
    assert isinstance(child, subprocess.Popen)
    assert "error: nowhere" in (tmp_path / "screen").read_text()
    assert forking._server is None, "its next answer may be to this request"


def test_a_process_that_ends_before_it_is_ready_has_ended(monkeypatch):
    ours, theirs = multiprocessing.Pipe()
    theirs.send(os.posix_spawn(shutil.which("false"), ["false"], {}))
    assert forking.fork(ours, [], {}, ".", (1, 2)).wait(10) == 1


ENDS = """
import atexit, sys, threading, time
from multiprocessing.connection import Connection
from shoal.cli import app
from shoal.launch.forking import serve

def main(honest=app.main):
    ended = threading.Event()
    threading.Thread(target=lambda: ended.wait() and time.sleep(0.3) or print("in a thread")).start()
    try:
        honest()
    finally:
        ended.set()

app.main = main
atexit.register(print, "at exit")
serve(Connection(int(sys.argv[1])), ["shoal.cli.app"])
"""


def test_a_forked_process_ends_after_its_threads_and_what_is_registered_with_all_it_said(tmp_path):
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-c", ENDS, str(theirs.fileno())]
    os.environ.pop("PYTHONUNBUFFERED", None)
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]), (tmp_path / "screen").open("wb") as screen:
        child = forking.fork(ours, ["--version"], os.environ, ".", (screen.fileno(), screen.fileno()))
        assert child.wait(60) == 0
        ours.close()
        theirs.close()
    assert (tmp_path / "screen").read_text().endswith("\nin a thread\nat exit\n")


def lose_a_rank(running):
    lost = running.pid(1)
    os.kill(lost, signal.SIGKILL)
    running.wait_for(lambda: running.pid(1) != lost, "restart")


@pytest.mark.proof
def test_ranks_come_back_whether_their_server_is_asked_to_end_or_killed(data, tmp_path):
    running = Running(data, tmp_path, "--nproc", "2", "--train.steps", "100000")
    running.wait_for_step(2)
    (server,) = set(children(running.process.pid)) - {running.pid(0), running.pid(1)}
    os.kill(server, signal.SIGTERM)  # by a scheduler, say, that signals all of a job
    lose_a_rank(running)
    assert alive(server)
    os.kill(server, signal.SIGKILL)
    lose_a_rank(running)
    running.process.send_signal(signal.SIGTERM)
    status, screen = running.end()
    assert status == 75, screen
    assert screen.count("restarting all ranks") == 2


ASKED = """
import importlib, sys, torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name) or 0)
from shoal.launch.forking import PRELOADED
for module in PRELOADED:
    importlib.import_module(module)
sys.exit(f"while it loaded, torch.cuda.{asked[0]} was asked" if asked else 0)
"""


def test_the_process_that_ranks_are_forked_from_does_not_touch_a_gpu():
    """A process forked from one that has asked the driver for its GPUs cannot use them."""
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ENDING = """
import atexit, gc, sys
from shoal.runtime import startup

atexit.register(lambda: print("kept" if gc.get_freeze_count() else "collected"))  # runs last
startup.all_is_loaded()
assert gc.get_freeze_count()
if {triton}:
    sys.modules["triton"] = sys
"""


@pytest.mark.parametrize(("triton", "end"), [(False, "kept"), (True, "collected")])
def test_what_was_loaded_is_collected_at_the_end_only_where_triton_would_list_it(triton, end):
    command = [sys.executable, "-c", ENDING.format(triton=triton)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{end}\n"
