"""How this host reaches others: addresses, the interface that routes there; what differs between hosts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import InputError

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split HOST:PORT, [IPV6]:PORT too."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"--rdzv {text} is not HOST:PORT",
            hint="give the address of the first host and a free port there, for example 10.0.0.1:29400",
        )
    return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Endpoint:
    """Where hosts meet (`--nnodes`, `--rdzv`, `--node-rank`); the default is this host alone, on loopback."""

    nnodes: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    node: int | None = None  # None: node 0 is the host that owns the address, the others come as they come

    def is_host(self, address: str) -> bool:
        """Say whether this host is node 0, which has the store at the numeric `address`."""
        return self.node == 0 or (self.node is None and is_own(address))


def several_hosts(nnodes: int, rdzv: str | None, node_rank: int | None) -> Endpoint | None:
    """Check --nnodes, --rdzv and --node-rank; return where the hosts meet, None for one host."""
    if nnodes < 1:
        raise InputError(f"--nnodes {nnodes}: at least 1 is needed")
    if nnodes == 1:
        if rdzv is not None or node_rank is not None:
            raise InputError("--rdzv and --node-rank are for several hosts", hint="add --nnodes N")
        return None
    if rdzv is None:
        raise InputError(
            f"--nnodes {nnodes} needs --rdzv HOST:PORT, where the hosts meet",
            hint="give an address of the first host and a free port there, for example --rdzv 10.0.0.1:29400",
        )
    if node_rank is not None and not 0 <= node_rank < nnodes:
        raise InputError(f"--node-rank {node_rank} is not among {nnodes} nodes: use 0 to {nnodes - 1}")
    return Endpoint(nnodes, *parse_endpoint(rdzv), node_rank)


def resolve(host: str, port: int) -> str:
    """Return the numeric address of a host."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InputError(
            f"the name {host} does not resolve here: {error.strerror}",
            hint="use a numeric address, or add the name to DNS or /etc/hosts",
        ) from error


def is_loopback(address: str) -> bool:
    """Say whether a numeric address means "this machine" on every machine."""
    return address.startswith("127.") or address == "::1"


def is_own(address: str) -> bool:
    """Say whether a numeric address belongs to this host."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def address_towards(address: str) -> str:
    """Return this host's own address on the route to another; nothing is sent."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise InputError(
                f"this host has no route to {address}: {error.strerror}",
                hint="check the address, and the network of this host",
            ) from error
        return str(probe.getsockname()[0])


def interface_towards(address: str) -> str:
    """Name the interface on the route to a numeric address; empty where the system does not tell."""
    own = "127.0.0.1" if address.startswith("127.") else address_towards(address)
    return interfaces().get(own, "")


def interfaces() -> dict[str, str]:
    """Return the name of the interface that holds each of this host's numeric addresses."""

    class Entry(ctypes.Structure):
        """The begin of struct ifaddrs, the same on Linux and macOS."""

    Entry._fields_ = [
        ("next", ctypes.POINTER(Entry)),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    ]
    libc, first = ctypes.CDLL(None), ctypes.POINTER(Entry)()
    found: dict[str, str] = {}
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return {}
    entry = first
    while entry:
        if (address := _numeric(entry.contents.address)) is not None:
            found.setdefault(address, entry.contents.name.decode())
        entry = entry.contents.next
    libc.freeifaddrs(first)
    return found


def choose_interface(address: str, *, across_hosts: bool) -> str:
    """Make gloo and NCCL use the interface that routes to `address`, unless the user set one; return it.

    Loopback across hosts is refused: each host would look for the others in itself.
    """
    named = {variable: os.environ.get(variable, "") for variable in INTERFACE_VARIABLES}
    if across_hosts:
        refuse_loopback(address, "MASTER_ADDR")
        for variable, interface in named.items():
            if interface.strip("=") in ("lo", "lo0"):
                raise InputError(
                    f"{variable} = {interface}, but the ranks are on several hosts: loopback stays in one",
                    hint=f"unset {variable}: the interface is found",
                )
    interface = interface_towards(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if across_hosts:  # "=": this very name, where NCCL would take it as a prefix
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return named["GLOO_SOCKET_IFNAME"] or interface


def refuse_loopback(address: str, given: str) -> None:
    """Refuse a loopback address as the rendezvous of several hosts."""
    if is_loopback(address):
        others = [own for own in interfaces() if not is_loopback(own) and not own.startswith("fe80")]
        raise InputError(
            f"{given} is {address}, this machine's loopback address: on any other host it means that host "
            "itself, so other hosts cannot connect to it",
            hint="give an address that the other hosts reach"
            + (f": {' or '.join(others)}" if others else ""),
        )


def differing(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Compare hosts: host -> what -> value; return one sentence for each difference."""
    sentences = []
    for what in dict.fromkeys(name for values in facts.values() for name in values):
        hosts: dict[str, list[str]] = {}
        for host, values in facts.items():
            hosts.setdefault(values.get(what, "missing"), []).append(host)
        if len(hosts) > 1:
            told = "; ".join(f"{value} on {_some(names)}" for value, names in hosts.items())
            sentences.append(f"{what} differs: {told}")
    return sentences


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _numeric(pointer: int | None) -> str | None:
    """Read an IP address from a struct sockaddr; None where it holds another kind of address."""
    if not pointer:
        return None
    head = ctypes.string_at(pointer, 2)
    family = head[1] if platform.system() == "Darwin" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        offset, length = 4, 4  # in sockaddr_in
    elif family == socket.AF_INET6:
        offset, length = 8, 16  # in sockaddr_in6
    else:
        return None
    return socket.inet_ntop(family, ctypes.string_at(pointer + offset, length))
