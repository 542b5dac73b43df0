"""Compiled blocks under layouts give the curve of plain ones; layouts share a worker's compiled code."""

import numpy as np
import pytest

from shoal.config.layout import parse_layout
from tests.pool import Pool
from tests.tiny_dataset import random_dataset
from tests.train.layouts import values_of
from tests.train.ranks import run_training

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]


@pytest.fixture
def new_pool():
    """Processes without compiled code: what was compiled for one process group must not run under another."""
    workers = Pool()
    yield workers
    workers.close()


def run_each(run_dir, every):
    """Train once for each of some layouts' values."""
    return {words: run_training(run_dir / words, values)["losses"] for words, values in every.items()}


@pytest.mark.parametrize(
    ("model", "layouts"), [("gpt2-dropout", ("dp2", "zero3x2", "tp2+sp")), ("llama", ("zero2x2", "tp2"))]
)
def test_compiled_layouts_train_as_one_plain_process_does(new_pool, tmp_path, model, layouts):
    data = random_dataset(tmp_path / "walk")
    plain = values_of(data, parse_layout("1"), model)
    expected = new_pool.run(run_training, 1, tmp_path / "plain", plain)[0]["losses"]
    every = {words: values_of(data, parse_layout(words), model, train={"compile": "on"}) for words in layouts}
    for losses in new_pool.run(run_each, 2, tmp_path, every, timeout=800)[:1]:
        for words, curve in losses.items():
            np.testing.assert_allclose(curve, expected, rtol=2e-6, err_msg=words)
