"""One job on two hosts, which are network namespaces."""

from __future__ import annotations

import time
from pathlib import Path

from shoal.bench.hosts import NAMES, TwoHosts
from tests.train.commands import command

SIZES = ("--train.micro_batch_size", "2", "--runtime.timeout_s", "60")


class Job:
    """The same command on both hosts, each in a folder of its own where the run folder is relative."""

    def __init__(self, hosts: TwoHosts, data: Path, run: str | Path, cwd: Path, *arguments: str):
        self._hosts, self._data, self._run, self._cwd = hosts, data, run, cwd
        self._arguments = (*SIZES, *arguments)
        self.processes = {}
        for name in NAMES:
            self.start(name)

    def start(self, name: str, *more: str) -> None:
        folder = self._cwd / name
        folder.mkdir(exist_ok=True)
        words = command(self._data, self._run, "--nproc", "2", "--nnodes", "2", *self._arguments, *more)
        self.processes[name] = self._hosts.start(name, [*words, "--rdzv", self._hosts.rdzv], folder)

    def wait_for_step(self, metrics: Path, step: int, timeout: float = 200) -> None:
        until = time.monotonic() + timeout
        while f'"step": {step}, "tokens"' not in (metrics.read_text() if metrics.exists() else ""):
            assert time.monotonic() < until, f"no step {step} in time"
            for process in self.processes.values():
                assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)

    def end(self, name: str, timeout: float = 200) -> tuple[int, str]:
        screen, _ = self.processes[name].communicate(timeout=timeout)
        return self.processes[name].returncode, screen
