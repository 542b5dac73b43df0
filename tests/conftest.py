"""Fixtures that the whole suite shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Warm gloo workers; see tests/pool.py."""
    workers = Pool()
    yield workers
    workers.close()
