"""`shoal` as users meet it, for tests: real processes, which start at once.

They are forked from one that has loaded everything, as `shoal train` forks its ranks. What is about the start
itself, or about another launcher, runs `python -m shoal`.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from shoal.launch import forking

_MORE = ("plan.grading", "diagnosis.verdict", "data.prepare.run", "infer.terminal", "parity.command")
_LOADED = (*forking.PRELOADED, *(f"shoal.{name}" for name in _MORE), "tests.warm")
Done = subprocess.CompletedProcess[str]
# The smallest program of the command line's library: what its time depends on is the machine alone.
SMALLEST = "from cyclopts import App\nApp(name='shoal')(['--help'], result_action='return_value')\n"


class Command:
    """`shoal ARGUMENTS` in the background, with its screen in files, or on a `terminal`, an open file."""

    def __init__(
        self, *arguments: object, env: dict[str, str] | None = None, folder: str = "", terminal: int = -1
    ) -> None:
        words, variables = list(map(str, arguments)), os.environ | (env or {})
        self._screen, self._errors = TemporaryFile(), TemporaryFile()  # noqa: SIM115
        screen = (terminal, terminal) if terminal >= 0 else (self._screen.fileno(), self._errors.fileno())
        folder = folder or os.getcwd()
        self._child: forking.Child | subprocess.Popen[bytes]
        same_path = variables.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
        if sys.platform == "linux" and (same_path or "PLANTED" in variables):
            self._child = forking.fork(_server(), words, variables, folder, screen)
        else:  # a sitecustomize.py is read at the start
            command = [sys.executable, "-m", "shoal", *words]
            output = {"stdout": screen[0], "stderr": screen[1]}
            self._child = subprocess.Popen(command, env=variables, cwd=folder, **output)
        self.pid = self._child.pid

    def poll(self) -> int | None:
        """Return the exit status if it has ended."""
        return self._child.poll()

    def send_signal(self, number: int) -> None:
        """Signal the command, not its ranks."""
        self._child.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        self._child.send_signal(signal.SIGKILL)

    def said(self) -> tuple[str, str]:
        """Return what it has written so far: to the screen, and as errors."""
        written = [os.pread(file.fileno(), 1 << 24, 0) for file in (self._screen, self._errors)]
        screen, errors = (text.decode(errors="replace") for text in written)
        return screen, errors

    def end(self, timeout: float = 60) -> Done:
        """Wait for the end and return how it was; what is late is killed."""
        try:
            status = self._child.wait(timeout)
        finally:
            self.kill()
        return subprocess.CompletedProcess((), status, *self.said())


def run(*arguments: object, env: dict[str, str] | None = None, timeout: float = 90) -> Done:
    """Run `shoal ARGUMENTS` to its end."""
    return Command(*arguments, env=env).end(timeout)


def planted(folder: Path) -> dict[str, str]:
    """Return the environment in which a command first runs the sitecustomize.py of a folder.

    A new Python finds it on its path; a command that is forked here is told the file, and its ranks inherit
    what that did.
    """
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "PLANTED": str(folder / "sitecustomize.py")}


def processor_seconds(*program: str) -> float:
    """Return the processor time of a Python program: what a user waits for where nothing else runs."""
    child = subprocess.Popen([sys.executable, *program], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


def serve(descriptor: int) -> NoReturn:
    """Fork commands until the other end of the pipe is closed; each first runs the file named by PLANTED."""
    usual = runpy.run_module

    def run_module(name: str, **options: Any) -> Any:
        if file := os.environ.pop("PLANTED", ""):
            exec(compile(Path(file).read_text(), file, "exec"), {})
        return usual(name, **options)

    runpy.run_module = run_module
    forking.serve(Connection(descriptor), _LOADED)


@functools.cache
def _server() -> Connection:
    ours, theirs = Pipe()
    program = f"from tests.commands import serve; serve({theirs.fileno()})"
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE  # a stream that began as a file seeks, and a terminal cannot
    streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe}
    root = Path(__file__).resolve().parents[1]  # where `tests` is found, wherever the first test that asks is
    subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=root, **streams)
    theirs.close()
    return ours
