"""Layout never changes the result: losses and gradient norms for any number of processes and micro-steps."""

import numpy as np
import pytest

from tests.tiny_dataset import random_dataset
from tests.train.ranks import run_training, tiny_config

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return random_dataset(tmp_path_factory.mktemp("data") / "walk")


@pytest.fixture(scope="module")
def reference(pool, data, tmp_path_factory):
    def run(**sections):
        values = tiny_config(data, **sections)
        return pool.run(run_training, 1, tmp_path_factory.mktemp("run"), values)[0]

    return {"plain": run(), "dropout": run(model=DROPOUT)}


@pytest.mark.parametrize("kind", ["plain", "dropout"])
@pytest.mark.parametrize(
    ("world_size", "micro"), [(1, 16), (1, 8), (2, 8), (2, 4), (2, 2), (4, 4), (4, 2), (4, 1)]
)
def test_processes_and_accumulation_do_not_change_the_curve(
    pool, data, reference, tmp_path, world_size, micro, kind
):
    model = DROPOUT if kind == "dropout" else {}
    values = tiny_config(data, train={"micro_batch_size": micro}, model=model)
    got = pool.run(run_training, world_size, tmp_path, values)[0]
    np.testing.assert_allclose(got["losses"], reference[kind]["losses"], rtol=2e-6)
    np.testing.assert_allclose(got["norms"], reference[kind]["norms"], rtol=2e-6)


def test_all_ranks_hold_the_same_weights(pool, data, tmp_path):
    results = pool.run(run_training, 2, tmp_path, tiny_config(data))
    for name, weight in results[0]["weights"].items():
        assert np.array_equal(weight, results[1]["weights"][name]), name


def test_dropout_changes_the_curve(reference):
    assert reference["plain"]["losses"] != reference["dropout"]["losses"]
