"""A checkpoint from a stranger: whatever its files hold, nothing in them is run."""

from __future__ import annotations

import _codecs
import contextlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.checkpoint.manifest import MANIFEST, read_state, resolve_checkpoint
from shoal.checkpoint.tensors import load_weights
from shoal.cli.checkpoint import list_checkpoints, verify_checkpoints
from shoal.errors import CheckpointError, ShoalError
from shoal.infer.load import load_text_model
from shoal.interop.pickles import read_pickle
from tests.cases import every
from tests.checkpoint.damage import files_of, forge_manifest
from tests.checkpoint.ranks import load_latest
from tests.checkpoint.tiny import Tiny
from tests.pool import Pool


class Command:
    """An object whose unpickling leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def as_pickle(marker: Path) -> bytes:
    return pickle.dumps(Command(marker))


def as_torch_file(marker: Path) -> bytes:
    path = marker.with_suffix(".pt")
    torch.save({"weight": Command(marker)}, path)
    return path.read_bytes()


def as_text(marker: Path) -> bytes:
    words = f"__import__('os').system('touch {marker}')"
    return json.dumps(
        {"py/reduce": [words], "!!python/object/apply:os.system": words, "loss": words}
    ).encode()


def as_tensor_header(marker: Path) -> bytes:
    text = as_text(marker).decode()
    pickled = as_pickle(marker).decode("latin1")
    header = {
        "__metadata__": {"DCP_SHARDING_INFO": text, "DCP_VERSION": pickled, "format": "pt"},
        "up.weight": {"dtype": "F32", "shape": [7, 3], "data_offsets": [0, 84]},
    }
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(84)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "command-was-run"


def test_the_planted_commands_would_work(marker: Path):
    pickle.loads(as_pickle(marker))
    assert marker.exists()


@pytest.mark.parametrize("plant", every(2, [as_pickle, as_torch_file, as_tensor_header, as_text]))
def test_a_command_in_any_file_is_not_run(
    pool: Pool, run: Path, marker: Path, plant: Callable[[Path], bytes]
):
    content = plant(marker)
    origin = run / "checkpoints" / "step-00000020"
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    (origin / "tokenizer.json").write_text("{}")
    targets = [str(path.relative_to(origin)) for path in files_of(origin)]
    for target in targets:
        for forged in (False, True):
            folder = run.parent / f"{target.replace('/', '-')}-{forged}" / "checkpoints"
            shutil.copytree(origin, folder / origin.name)
            (folder / origin.name / target).write_bytes(content)
            if forged and target != MANIFEST:
                forge_manifest(folder / origin.name)
            use_everything(folder / origin.name, pool)
            assert not marker.exists(), target


@pytest.mark.parametrize(
    "name", [".metadata", "model/.metadata", "__0_0.distcp", "pytorch_model.bin", "model.pt"]
)
def test_a_pickle_beside_the_files_is_not_read(pool: Pool, run: Path, marker: Path, name: str):
    checkpoint = run / "checkpoints" / "step-00000020"
    (checkpoint / name).write_bytes(as_torch_file(marker))
    use_everything(checkpoint, pool)
    assert not marker.exists()


def use_everything(checkpoint: Path, pool: Pool) -> None:
    """Do all that Shoal does with a checkpoint; a sentence is fine, any other error fails the test."""
    uses: list[Callable[[], object]] = [
        lambda: verify_checkpoints(checkpoint),
        lambda: list_checkpoints(checkpoint),
        lambda: resolve_checkpoint(checkpoint.parent),
        lambda: read_state(checkpoint),
        lambda: load_weights(checkpoint, Tiny()),
    ]
    for use in uses:
        with contextlib.suppress(ShoalError):
            use()
    with contextlib.suppress(Exception):  # a configuration or tokenizer that makes no sense
        load_text_model(checkpoint, torch.device("cpu"))
    pool.run(use_for_training, 1, checkpoint.parent)


def use_for_training(folder: Path) -> None:
    """Resume from whatever is there."""
    with contextlib.suppress(ShoalError, AssertionError):  # refused, or other numbers than ours
        load_latest(folder)


class _Hex:
    """Pickled as a call that doubles a text."""

    def __init__(self, inner):
        self.inner = inner

    def __reduce__(self):
        return _codecs.encode, (self.inner, "hex")


def test_a_pickle_that_encodes_a_text_again_and_again_is_refused(tmp_path):
    inner = b"ab"
    for _ in range(28):
        inner = _Hex(inner)
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"model": inner}, 2))
        archive.writestr("a/version", "3")
    with pytest.raises(CheckpointError, match="encodes text in a way that torch"):
        read_pickle(tmp_path / "model.pt")


def test_what_numpy_saves_in_a_pickle_is_read(tmp_path):
    state = {"scalar": np.float64(2.5), "random": np.random.RandomState(1).get_state()}
    torch.save(state, tmp_path / "model.pt")
    allowed = [np.ndarray, np.dtype, np.ndarray(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    with torch.serialization.safe_globals(allowed):  # as Megatron's package adds on import
        state = read_pickle(tmp_path / "model.pt")
        assert set(allowed) <= set(torch.serialization.get_safe_globals())
    assert list(state) == ["scalar", "random"]
    assert not isinstance(state["random"][1], np.ndarray)
