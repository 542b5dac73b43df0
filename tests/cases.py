"""Which of many cases `make test` tries; `make proof` tries the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(nth: int, cases: Iterable[Any]) -> list[Any]:
    """Mark all cases but each nth, from the first, for `make proof`; a case is a tuple or one value."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.proof] * (n % nth > 0)
        )
        for n, case in enumerate(cases)
    ]
