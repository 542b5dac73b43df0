"""Fixtures that the whole suite shares."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.pool import Pool


def pytest_configure() -> None:
    """Undo what a shell does to commands in its background: their children would not hear Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Warm gloo workers; see tests/pool.py."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo what a test does to the environment: a command run in this process chooses the interface, say."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
