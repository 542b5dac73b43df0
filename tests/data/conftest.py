"""Fixtures for tests of data: real files where they are, and a preparation without worker processes."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from shoal.data.prepare import run
from shoal.data.prepare.engine import Engine
from shoal.data.prepare.options import PrepareOptions
from tests.shared import SHARED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of real data that lies beside a checkout, or skip."""
    if (SHARED / "data").is_dir():
        return SHARED / "data"
    pytest.skip("no folder `shared` with real data beside the checkout (SHOAL_SHARED names one)")


@pytest.fixture(scope="session")
def gpt2_folder(shared) -> Path:
    return shared / "gpt2-tokenizer"


@pytest.fixture
def in_process(monkeypatch):
    """Let ranges run in the test's own process: as in a worker, without its start-up."""

    def run_here(self, job, items):
        worker = job.make()
        for item in items:
            yield worker.run(item, lambda read_bytes: None)

    monkeypatch.setattr(Engine, "run", run_here)


@pytest.fixture
def prepare(in_process, tmp_path):
    """Return prepare(input, ..., option=value) -> (dataset, what was printed)."""

    def call(*inputs, output=None, **options):
        console = Console(width=200, record=True, file=io.StringIO())
        chosen = {"tokenizer": "bytes", "output": output or tmp_path / "dataset", **options}
        dataset = run.prepare(PrepareOptions(tuple(map(str, inputs)), **chosen), console)
        return dataset, console.export_text()

    return call


@pytest.fixture
def documents_of():
    """Return a function that lists a split's documents as text."""
    from shoal.data.indexed import IndexedReader
    from shoal.data.tokenizer import load_tokenizer

    def call(dataset, name="train"):
        reader = IndexedReader(dataset.path / name)
        tokenizer = load_tokenizer(dataset.path)
        return [tokenizer.decode(reader.document(n)) for n in range(reader.num_documents)]

    return call


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder on a file system of 1 MiB, or skip."""
    import subprocess

    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
    shutil.rmtree(folder, ignore_errors=True)
