"""Extraction in a process of its own, which dies where a page takes too long, too much memory, or crashes it.

The parent sends a page's length and its bytes, the child answers with one line of JSON. The kernel ends the
child at a page's deadline, also in the middle of a C library. Where the parent is gone, the child reads the
end of its input and leaves, at the latest at the deadline.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from typing import Any

from shoal.errors import ConfigError, ShoalError

_MEMORY = 1 << 30  # bytes of address space
_CLOCK_FACTOR = 10  # how many times its CPU time a page may take by the clock
_COMMAND = "from shoal.data.prepare.web.child import serve; serve()"
_TOO_SLOW = {-signal.SIGPROF, -signal.SIGALRM}


class Extractor:
    """Runs an engine, "module:function", in a child process, which is made anew whenever it dies.

    The function takes `favour` and returns a function from HTML to {"text": ..., facts}.
    """

    def __init__(self, engine: str, favour: str, deadline_s: float) -> None:
        self._settings = [engine, favour, str(deadline_s)]
        self._deadline_s = deadline_s
        self._child = self._start()

    def run(self, page: bytes) -> dict[str, str]:
        """Return {"text": ..., facts} of a page in UTF-8, or {"reason": ..., "detail": ...}."""
        for attempt in range(
            2
        ):  # what went wrong may be due to earlier pages, or to whoever killed the child
            answer = self._ask(page)
            if answer is not None and "error" not in answer:
                return answer
            status = self._end()
            self._child = self._start()
            if answer is not None and attempt:
                return {"reason": "extraction failed", "detail": answer["error"]}
            if status in _TOO_SLOW:
                return {"reason": "extraction too slow", "detail": f"more than {self._deadline_s:g} s"}
        return {"reason": "extraction crashed", "detail": f"signal {-status}" if status < 0 else "exit"}

    def _ask(self, page: bytes) -> dict[str, str] | None:
        """Send a page and wait for the answer; None where the child died."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(b"%d\n" % len(page))
            self._child.stdin.write(page)
            self._child.stdin.flush()
        except BrokenPipeError:
            return None
        return self._answer(self._child)

    def _answer(self, child: subprocess.Popen[bytes]) -> dict[str, str] | None:
        assert child.stdout is not None
        line = child.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a child and wait until it has loaded its engine."""
        command = [sys.executable, "-P", "-c", _COMMAND, *self._settings]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        answer = self._answer(child)
        if answer is None:
            raise ShoalError(f"the extraction process ended with {child.wait()} before its first page")
        if "error" in answer:
            child.communicate()
            raise ConfigError(
                f"extraction needs a package: {answer['error']}", hint="pip install 'shoal[web]'"
            )
        return child

    def _end(self) -> int:
        """End the child; return its exit status."""
        with contextlib.suppress(BrokenPipeError):  # of a page that was not read to its end
            self._child.communicate()
        return self._child.wait()


def serve() -> None:
    """Be the child: answer for each page on standard input until it ends."""
    engine, favour, deadline_s = sys.argv[1:]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for libraries that print
    logging.disable()
    _prepare()
    module, name = engine.split(":")
    try:
        extract = getattr(importlib.import_module(module), name)(favour)
    except ImportError as error:
        _send(answers, {"error": str(error)})
        return
    _send(answers, {})
    while size := sys.stdin.buffer.readline():
        html = sys.stdin.buffer.read(int(size)).decode()
        _set_deadline(float(deadline_s))
        try:
            found = extract(html)
        except Exception as error:  # also MemoryError and RecursionError
            found = {"error": type(error).__name__}
        _set_deadline(0)
        _send(answers, found)


def _prepare() -> None:
    """Limit memory, and let the kernel end this process at a deadline, whatever its parent ignored."""
    with contextlib.suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM, signal.SIGPROF))


def _set_deadline(seconds: float) -> None:
    """Have the kernel end this process after so many seconds of CPU time, or many more by the clock."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _CLOCK_FACTOR)


def _send(answers: Any, answer: dict[str, str]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()
