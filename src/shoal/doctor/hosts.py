"""Can several hosts train together? `shoal doctor --rdzv HOST:PORT --nnodes N` runs this on each of them.

Every host sees the same findings, which name hosts. The checks talk through the launchers' own
rendezvous, so that what works here works for training.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.doctor.machine import Finding
from shoal.errors import ShoalError
from shoal.runtime import network
from shoal.runtime.network import Endpoint

if TYPE_CHECKING:
    from shoal.launch.rendezvous import Rendezvous

MEETING_LIMIT_S = 30.0
REACH_LIMIT_S = 3.0
CLOCK_LIMIT_S = 1.0


def check_hosts(endpoint: Endpoint, folder: Path, data: list[Finding]) -> list[Finding]:
    """Meet the other hosts at the endpoint, and compare.

    `data` holds what `check_dataset` saw here.
    """
    from shoal.launch.rendezvous import Rendezvous

    try:
        hosts = Rendezvous(endpoint, 1, MEETING_LIMIT_S)
    except ShoalError as error:
        return [Finding("rendezvous", "problem", error.message, error.hint)]
    try:
        return [
            Finding("rendezvous", "ok", hosts.describe()),
            check_interface(hosts.address),
            *check_ports(hosts),
            check_likeness(hosts, versions() | {finding.check: finding.fact for finding in data}),
            check_shared_folder(hosts, folder),
        ]
    except ShoalError as error:
        return [Finding("rendezvous", "problem", error.message, error.hint)]
    finally:
        hosts.shutdown()


def check_interface(address: str, chosen: str | None = None) -> Finding:
    """Which interface routes to the rendezvous, and will gloo use it? `chosen` is the user's wish."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "") if chosen is None else chosen
    found = network.interface_towards(address)
    fact = f"{found} ({network.address_towards(address)}) routes to {address}"
    if chosen and chosen != found:
        advice = f"unset GLOO_SOCKET_IFNAME, unless {chosen} leads to all hosts, too"
        return Finding("interface", "warning", f"{fact}, but GLOO_SOCKET_IFNAME = {chosen}", advice)
    return Finding("interface", "ok", f"{fact}: gloo and NCCL will use it")


def check_ports(hosts: Rendezvous) -> list[Finding]:
    """Does every host reach every other on a port of the system's choice, and do their clocks agree?"""
    with _clock_server(network.address_towards(hosts.address)) as endpoint:
        endpoints = hosts.exchange("port", endpoint)
        with ThreadPoolExecutor(hosts.nnodes) as threads:  # dropped packets cost each of them its time-out
            seen = list(threads.map(lambda endpoint: ask_clock(*endpoint), endpoints))
        views = hosts.exchange("reach", seen)
    return [judge_reach(hosts.hosts, views), judge_clocks(hosts.hosts, views)]


def judge_reach(names: list[str], views: list[list[dict[str, Any]]]) -> Finding:
    """Judge who reaches whom; views[a][b] holds what host a saw of host b: "offset", or "error"."""
    blocked = [
        f"{names[one]} does not reach {names[other]} at {seen['where']}: {seen['error']}"
        for one, view in enumerate(views)
        for other, seen in enumerate(view)
        if "error" in seen
    ]
    if blocked:
        advice = (
            "let the hosts through each other's firewalls on all ports: gloo and NCCL choose theirs freely"
        )
        return Finding("ports", "problem", "; ".join(blocked), advice)
    return Finding("ports", "ok", f"all {len(names)} hosts reach each other, both ways")


def judge_clocks(names: list[str], views: list[list[dict[str, Any]]]) -> Finding:
    """Judge by how much the clocks differ from the first host's."""
    offsets = {names[node]: seen["offset"] for node, seen in enumerate(views[0]) if "offset" in seen}
    fact = (
        ", ".join(f"{name} {offset * 1e3:+.0f} ms" for name, offset in list(offsets.items())[1:]) or "unknown"
    )
    fact = f"from {names[0]}'s: {fact}"
    if max(map(abs, offsets.values())) > CLOCK_LIMIT_S:
        advice = "run an NTP service on all hosts: the first cause of a failure is found by time"
        return Finding("clocks", "warning", fact, advice)
    return Finding("clocks", "ok", fact)


def check_dataset(path: Path) -> Finding:
    """Is a dataset there? What was seen is its fingerprint."""
    from shoal.data.dataset import open_dataset

    try:
        return Finding(f"dataset {path}", "ok", open_dataset(path.absolute()).fingerprint)
    except ShoalError as error:
        return Finding(f"dataset {path}", "problem", error.message, error.hint)


def versions() -> dict[str, str]:
    """Return the versions that all hosts should share."""
    found = {name: importlib.metadata.version(name) for name in ("shoal", "torch")}
    return found | {"python": platform.python_version()}


def check_likeness(hosts: Rendezvous, facts: dict[str, str]) -> Finding:
    """Do versions and datasets agree?"""
    everyone = hosts.exchange("facts", facts)
    names = [f"{name} (node {node})" for node, name in enumerate(hosts.hosts)]
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    if problems := network.differing(dict(zip(names, everyone, strict=True))):
        return Finding("versions and data", "problem", "; ".join(problems), "make the hosts alike")
    return Finding("versions and data", "ok", f"alike: {told}")


def check_shared_folder(hosts: Rendezvous, folder: Path) -> Finding:
    """Is a folder the same one on all hosts, and does a lock that one host holds keep the others out?"""
    name = hosts.exchange("nonce", f".shoal-doctor-{secrets.token_hex(8)}")[0]
    file = (folder / name).absolute()
    with contextlib.ExitStack() as stack:
        error = ""
        if hosts.node == 0:
            try:
                handle = lock_of(file)
                stack.callback(file.unlink)
                stack.callback(os.close, handle)
            except OSError as refused:
                error = str(refused.strerror)
        if error := hosts.exchange("lock", error)[0]:
            fact = f"{folder.absolute()} on {hosts.hosts[0]} takes no locked file: {error}"
            return Finding("shared folder", "problem", fact, "work in a folder you own")
        seen = hosts.exchange("seen", (file.exists(), file.exists() and not _may_lock(file)))
    return judge_folder(str(folder.absolute()), hosts.hosts, seen)


def judge_folder(folder: str, names: list[str], seen: list[tuple[bool, bool]]) -> Finding:
    """Judge which hosts saw node 0's file, and found it locked."""
    apart = [name for name, (there, _) in zip(names, seen, strict=True) if not there]
    if apart:
        fact = f"{folder} of {names[0]} is not seen on {', '.join(apart)}"
        advice = (
            "nothing, or share it: each host will keep its part of a checkpoint (docs/several-machines.md)"
        )
        return Finding("shared folder", "ok", fact, advice)
    unlocked = [name for name, (_, locked) in list(zip(names, seen, strict=True))[1:] if not locked]
    if unlocked:
        fact = f"{folder} is shared, but {names[0]}'s lock does not keep {', '.join(unlocked)} out"
        return Finding(
            "shared folder", "warning", fact, "never start one run twice; mount NFS with its locks (v4)"
        )
    return Finding("shared folder", "ok", f"{folder} is the same on all hosts, locks work")


def check_locks(folder: Path) -> Finding:
    """Do file locks work in a folder, so that one run is not trained twice at a time?"""
    file = folder / f".shoal-doctor-{secrets.token_hex(8)}"
    try:
        held = lock_of(file)
    except OSError as error:
        return Finding(
            "locks", "warning", f"{folder} takes no lock: {error.strerror}", "use another file system"
        )
    try:
        if _may_lock(file):
            advice = "never start one run twice; mount NFS with its locks (v4)"
            return Finding("locks", "warning", f"{folder} gives one lock to two", advice)
    finally:
        os.close(held)
        file.unlink()
    return Finding("locks", "ok", f"file locks work in {folder}")


def lock_of(file: Path) -> int:
    """Make a file and lock it; return the handle that holds the lock."""
    handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        file.unlink()
        raise
    return handle


def _may_lock(file: Path) -> bool:
    handle = os.open(file, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextlib.contextmanager
def _clock_server(address: str) -> Iterator[tuple[str, int]]:
    """Answer each connection with the time of day, until the block ends."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # closed
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(json.dumps(time.time()).encode())

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield address, server.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread


def ask_clock(address: str, port: int) -> dict[str, Any]:
    """Return by how much a host's clock is ahead of ours ("offset"), or the "error" of connecting to it."""
    try:
        with socket.create_connection((address, port), timeout=REACH_LIMIT_S) as connection:
            asked = time.time()
            theirs = float(json.loads(connection.recv(64)))
            return {"offset": theirs - (asked + time.time()) / 2}
    except (OSError, ValueError) as error:
        return {"error": str(error), "where": f"{address}:{port}"}
