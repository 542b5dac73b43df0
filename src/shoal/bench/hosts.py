"""Two hosts on one machine: network namespaces joined by a cable (a veth pair), each with its own host name.

Needs root and iproute2 (`ip`, and `tc` if the cable has a rate). Processes in the namespaces end with them.
Namespaces left behind by a killed process are removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

ADDRESSES = {"north": "10.77.0.1", "south": "10.77.0.2"}
NAMES = tuple(ADDRESSES)
_PREFIX = "shoalhosts"
_BURST_BYTES = 32 << 10  # smallest burst; larger if the rate needs it
_TICKS_PER_S = 250  # period of the slowest timers: a bucket must hold the bytes between two ticks
_QUEUE_MS = 50  # packets that wait longer are dropped, and resent by TCP


class TwoHosts:
    """Hosts `north` (node 0) and `south`, 10.77.0.1 and 10.77.0.2, without any other network."""

    rdzv = "10.77.0.1:29400"

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        """Make the hosts. The argument limits the rate at each end of the cable; 0 is no limit.

        Raises:
            subprocess.CalledProcessError: The system does not permit it; call `why_not` first.
        """
        _remove_leftovers()
        self._spaces = {name: f"{_PREFIX}-{os.getpid()}-{name}" for name in NAMES}
        self._started: list[subprocess.Popen[str]] = []
        try:
            self._lay(bytes_per_s)
        except BaseException:
            self.close()
            raise

    def _lay(self, bytes_per_s: float) -> None:
        for space in self._spaces.values():
            _ip("netns", "add", space)
        north, south = self._spaces.values()
        _ip("-n", north, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", south)
        for name, space in self._spaces.items():
            _ip("-n", space, "address", "add", f"{ADDRESSES[name]}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                _ip("-n", space, "link", "set", interface, "up")
            if bytes_per_s:
                bucket = max(_BURST_BYTES, round(bytes_per_s / _TICKS_PER_S))
                shape = ["rate", f"{round(bytes_per_s * 8)}bit", "burst", str(bucket)]
                shape += ["latency", f"{_QUEUE_MS}ms"]
                _run("tc", "-n", space, "qdisc", "add", "dev", "cable", "root", "tbf", *shape)

    def enter(self, name: str) -> list[str]:
        """Return the prefix of a command that runs it on a host."""
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        return ["ip", "netns", "exec", self._spaces[name], *rename]

    def start(
        self,
        name: str,
        command: list[str],
        cwd: Path | None = None,
        stdout: Any = subprocess.PIPE,
        **env: str,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, in a session of its own; the process id is that of the command."""
        words = [*self.enter(name), "env", *(f"{key}={value}" for key, value in env.items()), *command]
        process = subprocess.Popen(
            words, stdout=stdout, stderr=subprocess.STDOUT, text=True, cwd=cwd, start_new_session=True
        )
        self._started.append(process)
        return process

    def sent_bytes(self, name: str) -> int:
        """Return the bytes that a host has sent over the cable so far, including packet headers."""
        told = json.loads(_ip("-n", self._spaces[name], "-s", "-j", "link", "show", "cable"))
        return int(told[0]["stats64"]["tx"]["bytes"])

    def unplug(self) -> None:
        """Disconnect the cable."""
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
        """Kill all remaining processes and remove the namespaces, and the cable with them."""
        existing = _ip("netns", "list")
        for name, space in self._spaces.items():
            if space in existing:
                try:
                    self.kill(name)
                finally:
                    _ip("netns", "delete", space)

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def why_not(*, shaped: bool = False) -> str:
    """Return why hosts, or hosts with a rate, cannot be made here; empty if no reason is found."""
    lacking = [tool for tool in ("ip", "unshare", *(("tc",) * shaped)) if shutil.which(tool) is None]
    if not lacking and os.geteuid() == 0:
        return ""
    needed = "root" if os.geteuid() else " and ".join(lacking)
    return f"two hosts are made of network namespaces: this needs {needed}"


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _remove_leftovers() -> None:
    for line in _ip("netns", "list").splitlines():
        prefix, _, rest = line.split()[0].partition("-")
        if prefix == _PREFIX and not Path(f"/proc/{rest.split('-')[0]}").exists():
            for pid in _ip("netns", "pids", line.split()[0]).split():
                os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "delete", line.split()[0])
