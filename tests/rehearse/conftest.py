"""The rehearsal runs where torch was built for CUDA and sees no device: `make gpu-rehearse`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def why_not() -> str | None:
    """Say why there is nothing to rehearse with this torch on this machine."""
    if torch.version.cuda is None:
        return "this torch has no CUDA build; `make gpu-rehearse` makes an environment that has"
    return "there is a CUDA device: `make gpu-check` tests on it" if torch.cuda.is_available() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := why_not():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))
