"""Two hosts on one machine: network namespaces joined by a cable (a veth pair), each with its own host name.

Needs root and iproute2, else the tests that ask for it are skipped and say so. What runs in the namespaces
ends with the test, and they go, after a failure too; what a killed pytest left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ADDRESSES = {"north": "10.77.0.1", "south": "10.77.0.2"}
NAMES = tuple(ADDRESSES)
_PREFIX = "shoaltest"


class TwoHosts:
    """`north` (node 0) and `south`, with the addresses 10.77.0.1 and 10.77.0.2, no way anywhere else."""

    rdzv = "10.77.0.1:29400"

    def __init__(self) -> None:
        self._spaces = {name: f"{_PREFIX}-{os.getpid()}-{name}" for name in NAMES}
        self._started: list[subprocess.Popen] = []
        for space in self._spaces.values():
            _ip("netns", "add", space)
        north, south = self._spaces.values()
        _ip("-n", north, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", south)
        for name, space in self._spaces.items():
            _ip("-n", space, "address", "add", f"{ADDRESSES[name]}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                _ip("-n", space, "link", "set", interface, "up")

    def enter(self, name: str) -> list[str]:
        """Return the words before a command that runs it on a host."""
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        return ["ip", "netns", "exec", self._spaces[name], *rename]

    def start(self, name: str, command: list[str], cwd: Path | None = None, **env: str) -> subprocess.Popen:
        """Start a command on a host; its process id is the command's own."""
        process = subprocess.Popen(
            [*self.enter(name), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env={**os.environ, **env},
        )
        self._started.append(process)
        return process

    def unplug(self) -> None:
        """Take the cable out."""
        _ip("-n", self._spaces["south"], "link", "set", "cable", "down")

    def kill(self, name: str) -> None:
        """Kill everything that runs on a host, as a power cut would."""
        until = time.monotonic() + 10
        while pids := _ip("netns", "pids", self._spaces[name]).split():
            assert time.monotonic() < until, f"{name} does not die"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for process in self._started:
                process.poll()
            time.sleep(0.05)

    def close(self) -> None:
        """Kill what is left and remove the namespaces; the cable goes with them."""
        for name, space in self._spaces.items():
            try:
                self.kill(name)
            finally:
                _ip("netns", "delete", space)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout


def _remove_leftovers() -> None:
    for line in _ip("netns", "list").splitlines():
        prefix, _, rest = line.split()[0].partition("-")
        if prefix == _PREFIX and not Path(f"/proc/{rest.split('-')[0]}").exists():
            for pid in _ip("netns", "pids", line.split()[0]).split():
                os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "delete", line.split()[0])


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts of one's own."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("two hosts are made of network namespaces: this needs root, iproute2 (ip) and unshare")
    try:
        _remove_leftovers()
        hosts = TwoHosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this system makes no network namespaces: {error.stderr}")
    try:
        yield hosts
    finally:
        hosts.close()
