"""A checkpoint of any layout writes the same text, in one process and cut over two."""

from pathlib import Path

import pytest
import torch

from shoal.config.layout import parse_layout
from shoal.infer.generate import GeneratedRow
from shoal.infer.load import load_text_model
from shoal.infer.sampling import Sampling
from tests.cases import every
from tests.train.layouts import values_of
from tests.train.ranks import run_training

ROWS = [GeneratedRow([102, 105, 115, 104], 8), GeneratedRow([256], 8, prompt=1)]  # of unequal length


def greedy(run_dir, tp=1):
    """Return (row, id) of each token, in order."""
    loaded = load_text_model(Path(run_dir), torch.device("cpu"), tp=tp)
    return list(loaded.generate(ROWS, Sampling(temperature=0)))


@pytest.mark.parametrize(
    ("words", "model"), every(2, [("zero3x2", "llama"), ("dp2*zero2x2", "llama"), ("pp2*tp2", "gpt2")])
)
def test_text_is_the_same_in_one_process_and_cut(pool, data, tmp_path, words, model):
    layout = parse_layout(words)
    values = values_of(data, layout, model, eval={"every": 0}, checkpoint={"every": 5})
    pool.run(run_training, layout.world_size, tmp_path, values)
    (whole,) = pool.run(greedy, 1, tmp_path)
    assert len(whole) == 16
    assert pool.run(greedy, 2, tmp_path, 2) == [whole, whole]
