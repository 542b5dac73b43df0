"""Fixtures that the whole suite shares."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Copies(TorchDispatchMode):
    """Notes each copy from one kind of device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[1 if func.overloadpacket is torch.ops.aten.copy_ else 0]
            if source.device.type != out.device.type:
                self.seen.append(f"{source.device.type} to {out.device.type}")
        return out


@pytest.fixture
def copies() -> Iterator[list[str]]:
    """The copies between devices that are made while the test runs; meta may play the GPU."""
    with _Copies() as mode:
        yield mode.seen
