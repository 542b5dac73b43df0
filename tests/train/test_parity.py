"""Every layout gives the losses and norms of one process, and all of its weights."""

import pytest

from shoal.config.layout import parse_layout
from tests.cases import every
from tests.train.layouts import CASES, check, values_of
from tests.train.ranks import run_training


@pytest.fixture(scope="module")
def references(pool, data, tmp_path_factory):
    """Return a function that trains a model in one process, once."""
    known = {}

    def run(model):
        if model not in known:
            values = values_of(data, parse_layout("1"), model)
            known[model] = pool.run(run_training, 1, tmp_path_factory.mktemp("run"), values)[0]
        return known[model]

    return run


@pytest.mark.parametrize(("words", "model", "recompute"), every(3, CASES))
def test_a_layout_trains_as_one_process_does(pool, data, references, tmp_path, words, model, recompute):
    layout = parse_layout(words)
    ranks = pool.run(run_training, layout.world_size, tmp_path, values_of(data, layout, model, recompute))
    check(ranks, references(model))


def test_parts_of_unequal_depth_train_as_one_process_does(pool, data, tmp_path):
    alone, cut = (values_of(data, parse_layout(words), "gpt2") for words in ("1", "pp2"))
    for values in (alone, cut):
        values["model"]["n_layers"] = 5
    cut["parallel"]["split"] = (3, 2)
    reference = pool.run(run_training, 1, tmp_path / "one", alone)[0]
    ranks = pool.run(run_training, 2, tmp_path / "two", cut)
    check(ranks, reference)
    own = [sum(name.endswith("attention.q.weight") for name in rank["weights"]) for rank in ranks]
    assert own == [3, 2]
