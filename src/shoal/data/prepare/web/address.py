"""Addresses that may be connected to, and the resolver that gives no others."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

Lookup = Callable[..., list[Any]]  # socket.getaddrinfo
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: its last 32 bits are the IPv4 address


class ForbiddenAddressError(OSError):
    """A name that stands for private addresses alone."""


def is_public(address: str) -> bool:
    """Tell whether an IP address is one of the public internet.

    Private, loopback, link-local, shared, multicast, reserved and unspecified ones are not (the registries of
    RFC 6890), nor are IPv6 addresses that carry such an IPv4 address (mapped, 6to4, NAT64).
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def is_address(host: str) -> bool:
    """Tell whether a host is an IP address, not a name."""
    try:
        return bool(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return False


class PublicResolver:
    """A resolver for aiohttp whose answers are public addresses only, unless `allow_private`.

    The connector connects to what it answers and asks nobody else, so that a name cannot stand for another
    address between check and connection. Raises ForbiddenAddressError where no address is left.
    """

    def __init__(self, lookup: Lookup, threads: Executor, allow_private: bool) -> None:
        self._lookup, self._threads, self._allow_private = lookup, threads, allow_private

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        """Return the addresses of a name, as aiohttp's ResolveResult."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, self._lookup, host, port, family, socket.SOCK_STREAM
        )
        addresses = list(dict.fromkeys((info[0], info[4][0]) for info in found))
        allowed = [pair for pair in addresses if self._allow_private or is_public(pair[1])]
        if not allowed:
            raise ForbiddenAddressError(f"{host} is {', '.join(address for _, address in addresses)}")
        answer = {"hostname": host, "port": port, "proto": 0, "flags": socket.AI_NUMERICHOST}
        return [{**answer, "host": address, "family": kind} for kind, address in allowed]

    async def close(self) -> None:
        """Do nothing; aiohttp calls it."""
