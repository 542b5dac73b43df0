from __future__ import annotations

import pytest

from shoal.bench.record import begin


@pytest.fixture(autouse=True)
def machine_before() -> None:
    """Let the record of a test name the load from before this test, not from before the first one."""
    begin.cache_clear()
    begin()
