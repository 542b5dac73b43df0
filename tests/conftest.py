"""Fixtures that the whole suite shares."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint.ranks import save_steps
from tests.commands import processor_seconds
from tests.pool import Pool
from tests.tiny_dataset import random_dataset
from tests.train.commands import Running

_BEGAN = time.monotonic()  # about when pytest begins to count
_NUMBERS = itertools.count()  # of tests


def pytest_configure() -> None:
    """Undo what a shell does to commands in its background: their children would not hear Ctrl-C.

    Give the tests, and all processes that they start, a cache folder of their own. Let all compute with
    one thread: tiny tensors gain nothing by more, and lose a lot where other tests use the cores.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Plans neither read nor change what the user has measured; matplotlib's list of fonts is slow to make.
    os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache/matplotlib"))
    users = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    os.environ.setdefault("USERS_CACHE_HOME", users)  # not those of the process that distributes tests
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="shoal-tests-")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Load the tests with the garbage collector off, and leave what is loaded out of its later rounds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose tests have the longest time limits: workers of `make proof` end together."""
    limits: Counter[Path] = Counter()
    for item in items:
        marked = item.get_closest_marker("timeout")
        limits[item.path] = max(limits[item.path], marked.args[0] if marked else 0)
    items.sort(key=lambda item: -limits[item.path])


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes do not name a test: compressed ones may hold the time, and the workers compare names."""
    return argname if isinstance(val, bytes) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-times", action="store_true", help="keep the time by folder in a record")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the seconds of all tests by folder, those of their fixtures included."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = Path(report.nodeid.partition("::")[0]).parent
                seconds[str(folder)] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, took in seconds.most_common():
        terminalreporter.line(f"{took:8.1f}  {folder}")
    terminalreporter.line(f"{seconds.total():8.1f}  in all")
    if config.getoption("--record-times"):
        from benchmarks.record import write_record

        suite_s = round(time.monotonic() - _BEGAN, 1)
        of_torch = min(processor_seconds("-c", "import torch") for _ in range(3))  # the speed of this machine
        times = {name: round(took, 1) for name, took in seconds.most_common()}
        found = {"suite_s": suite_s, "import_torch_s": round(of_torch, 2), "seconds": times}
        write_record("test_times", found)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Warm gloo workers; see tests/pool.py."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of random walks over a small vocabulary."""
    return random_dataset(tmp_path_factory.mktemp("data") / "walk")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo what a test does to the environment: a command run in this process chooses the interface, say."""
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] += f"/{next(_NUMBERS)}"  # made where something is kept
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """End what a failed test has left running: its ranks end with it."""
    yield
    for running in Running.those_of_the_test:
        running.process.kill()
    Running.those_of_the_test.clear()


@pytest.fixture(scope="session")
def pristine(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoints folder with steps 10 and 20, written by two ranks."""
    folder = tmp_path_factory.mktemp("pristine") / "checkpoints"
    pool.run(save_steps, 2, folder, [10, 20])
    return folder


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    """A run folder of one's own with these checkpoints."""
    shutil.copytree(pristine, tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


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
