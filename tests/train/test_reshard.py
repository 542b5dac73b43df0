"""A checkpoint of any layout loads under any other, whole and unchanged, and training goes on as before.

Each layout saves once; a layout that loads builds its job once and reads all checkpoints in turn.
"""

import numpy as np
import pytest

from shoal.config.layout import parse_layout
from shoal.models.decoder import TIED
from tests.train.layouts import values_of
from tests.train.ranks import run_training
from tests.train.resharding import STYLES, check_matrix, load_each, save_and_go_on

LAYOUTS = ("zero3x2", "pp2*tp2")  # the proof has them all


def test_any_layout_loads_under_any_other(pool, data, tmp_path):
    check_matrix(pool, data, tmp_path, LAYOUTS, STYLES[0])


def test_both_stages_that_hold_a_tied_embedding_load_it(pool, data, tmp_path):
    """Only the first one saves it; the last must get weight and moments all the same."""
    one, two = parse_layout("1"), parse_layout("pp2")
    ((state, _),) = pool.run(save_and_go_on, 1, tmp_path / "1", values_of(data, one, "gpt2"))
    ranks = pool.run(load_each, 2, tmp_path / "pp2", values_of(data, two, "gpt2"), [tmp_path / "1"])
    for ((loaded, _),) in ranks:
        for name in (f"model.{TIED}", f"optimizer.{TIED}.exp_avg", f"optimizer.{TIED}.exp_avg_sq"):
            assert np.array_equal(loaded[name], state[name])


@pytest.mark.parametrize(
    ("first", "then", "style"),
    [
        ("tp2+sp", "pp2+interleaved", "gpt2-dropout"),
        pytest.param("zero2x2", "dp2*tp2", "llama-dropout", marks=pytest.mark.proof),
        ("zero2x2", "tp2", "llama-dropout"),
        pytest.param("pp2*tp2", "1", "gpt2", marks=pytest.mark.proof),
        pytest.param("dp2", "tp2", "gpt2-dropout", marks=pytest.mark.proof),
        pytest.param("pp2", "zero3x2", "gpt2", marks=pytest.mark.proof),
        pytest.param("1", "dp2*zero3x2", "llama", marks=pytest.mark.proof),
    ],
)
def test_a_run_goes_on_under_another_layout(pool, data, tmp_path, first, then, style):
    length = {"train": {"steps": 6}}
    expected = pool.run(
        run_training, 1, tmp_path / "whole", values_of(data, parse_layout("1"), style, **length)
    )[0]
    for words, halt in ((first, {"runtime": {"device": "cpu", "threads": 1, "stop_after": 3}}), (then, {})):
        layout = parse_layout(words)
        values = values_of(data, layout, style, **length, **halt)
        got = pool.run(run_training, layout.world_size, tmp_path / "parts", values)[0]
    assert got["steps"] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=2e-6)
    np.testing.assert_allclose(got["norms"], expected["norms"], rtol=2e-6)
