"""Processes that run `shoal`, forked from one that has loaded everything: they start at once.

Loading torch and what else a rank needs takes seconds. Here one process, the server, does it while its client
does other things, and is forked for each start and restart of a rank. It computes nothing, so that it has no
thread that a fork would lose, and touches no GPU. A forked process is a child of the client all the same.
Where this is unsafe (macOS), or the server is gone, a new Python is started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, reduction, util
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from shoal.errors import EXIT_FAILED
from shoal.runtime.startup import SIGNALS, all_is_loaded

# What a rank needs, and what the launcher of a replica group does.
PRELOADED = ("shoal.cli.app", "shoal.cli.train", "shoal.train.worker", "shoal.launch.launcher")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_POLL_S = 0.01

_server: Connection | None = None  # of this process


def load() -> None:
    """Fork the server, which begins to load. Call early: before there are threads or open `with` blocks."""
    global _server
    if sys.platform != "linux" or not _adopt_orphans(False):
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some daemons leave it ignored: no status would come
    ours, theirs = Pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        if not os.fork():
            ours.close()
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            serve(theirs, PRELOADED)
        _server = ours
    except OSError:  # no memory, or too many processes: a new Python may still start, or say so better
        pass
    finally:
        theirs.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def serve(client: Connection, modules: Sequence[str]) -> NoReturn:
    """Import modules, then fork a process for each request of the client, until that is gone.

    A forked process ends as a Python that was started anew would, but at once; the server just ends.
    """
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        gc.disable()
        for module in modules:
            importlib.import_module(module)
        all_is_loaded()
        while True:
            request = client.recv()
            screen = reduction.recv_handle(client), reduction.recv_handle(client)
            if _fork_orphan(client):
                break
            for descriptor in screen:
                os.close(descriptor)
    except BaseException:  # the client is gone, or starts a new Python, which tells what is wrong
        os._exit(0)
    _be_shoal(client, usual, screen, *request)


def _fork_orphan(client: Connection) -> bool:
    """Fork a process that the client adopts, and send it its id, or None; say whether this is the new one."""
    try:
        if between := os.fork():
            os.waitpid(between, 0)
            return False
    except OSError:
        client.send(None)
        return False
    between = os.getpid()
    try:
        if child := os.fork():
            client.send(child)
            os._exit(0)
    except OSError:
        client.send(None)
        os._exit(1)
    while os.getppid() == between:
        time.sleep(_POLL_S / 10)
    return True


def _be_shoal(
    client: Connection,
    usual: Mapping[signal.Signals, Any],
    screen: tuple[int, int],
    arguments: list[str],
    env: dict[str, str],
    folder: str,
    ignored: Sequence[int],
) -> NoReturn:
    os.setsid()
    for number, handler in usual.items():
        signal.signal(number, signal.SIG_IGN if number in ignored else handler)
    with contextlib.suppress(OSError):
        client.send(None)  # ready: signals are heard
    client.close()
    for descriptor, place in zip(screen, (1, 2), strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = ["shoal", *arguments]
    try:
        runpy.run_module("shoal", run_name="__main__")
    except SystemExit as ended:
        # As Python ends, but nothing is freed: pages shared with the server would be copied for it (0.3 s).
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        util._flush_std_streams()  # type: ignore[attr-defined]
        if isinstance(ended.code, int):
            os._exit(ended.code)
        raise
    except Exception:
        sys.excepthook(*sys.exc_info())  # without the frames that the server was forked from
    raise SystemExit(EXIT_FAILED)


def start(
    arguments: Sequence[str], env: Mapping[str, str] | None = None, output: int = 1, errors: int = 2
) -> Child | subprocess.Popen[bytes]:
    """Run `shoal ARGUMENTS` in a session of its own; `output` and `errors` are open files.

    Its environment is that of this process if none is given.
    """
    global _server
    env = os.environ if env is None else env
    if _server is not None:
        try:
            return fork(_server, arguments, env, os.getcwd(), (output, errors))
        except BaseException as error:
            _server.close()
            _server = None  # gone; or it would answer this request when the next one is made
            if not isinstance(error, (EOFError, OSError)):
                raise
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.Popen(command, env=env, stdout=output, stderr=errors, start_new_session=True)


def fork(
    server: Connection, arguments: Sequence[str], env: Mapping[str, str], folder: str, screen: tuple[int, int]
) -> Child:
    """Ask a server for a process that becomes a child of this one; see `start`."""
    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    child = None
    _adopt_orphans(True)
    try:
        server.send((list(arguments), dict(env), folder, ignored))
        for descriptor in screen:
            reduction.send_handle(server, descriptor, None)
        if (pid := server.recv()) is None:
            raise OSError("the server could not fork")
        child = Child(pid)
        while not server.poll(_POLL_S):
            if child.poll() is not None:  # killed before it was ready
                return child
        server.recv()
        return child
    except BaseException:
        if child is not None:
            child.send_signal(signal.SIGKILL)  # or there would be two
        raise
    finally:
        _adopt_orphans(False)


class Child:
    """A forked process, in those words of subprocess.Popen that its users need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status once it has ended; negative: the signal that ended it."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # not adopted yet, or a signal handler saw its end
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; subprocess.TimeoutExpired if it does not come."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("shoal", timeout or 0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Signal the process, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _adopt_orphans(on: bool) -> bool:
    """Let this process be the new parent of those below it that lose theirs, or no longer; say if it can."""
    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0)
