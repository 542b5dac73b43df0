"""Two hosts of a test's own; where they cannot be made, the test is skipped and says so."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from shoal.bench.hosts import TwoHosts, why_not


def make_hosts(bytes_per_s: float = 0.0) -> TwoHosts:
    """Return two hosts, or skip the test."""
    if reason := why_not(shaped=bool(bytes_per_s)):
        pytest.skip(reason)
    try:
        return TwoHosts(bytes_per_s)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this system makes no network namespaces: {error.stderr}")


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts of one's own."""
    with make_hosts() as hosts:
        yield hosts
