"""The reader in docs/checkpoints.md reads what Shoal writes, whole and cut."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkpoint.ranks import full_tensors, same, save_steps
from tests.pool import Pool

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_plain_safetensors_are_enough_to_read_a_checkpoint(
    pool: Pool, tmp_path: Path, cut: bool, monkeypatch
):
    run = tmp_path / "runs" / "first"
    pool.run(save_steps, 2, run / "checkpoints", [600], cut)
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    optimizer = names["read_tensors"](run / "checkpoints" / "step-00000600" / "optimizer")
    read = {f"model.{name}": tensor for name, tensor in names["weights"].items()}
    read |= {f"optimizer.{name}": tensor for name, tensor in optimizer.items()}
    assert same(read, full_tensors(600))
