"""Recompute and documents kept apart, in the whole job: the curve, its layouts and resuming."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import every
from tests.tiny_dataset import EOD_ID, write_dataset
from tests.train.ranks import make_job, run_training, tiny_config

DROPOUT = {"n_layers": 3, "dropout": 0.1, "attention_dropout": 0.1}
APART = {"reset_documents": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents shorter than a window."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, EOD_ID, rng.integers(1, 12)) for _ in range(1500)]
    splits = {"train": documents, "validation": documents[:200], "test": documents[:200]}
    return write_dataset(tmp_path_factory.mktemp("data") / "short", splits)


@pytest.fixture(scope="module")
def plain(pool, data, tmp_path_factory):
    return pool.run(run_training, 1, tmp_path_factory.mktemp("run"), tiny_config(data, model=DROPOUT))[0]


def assert_equal(left, right):
    assert left["losses"] == right["losses"]
    assert left["norms"] == right["norms"]
    for name, weight in left["weights"].items():
        assert np.array_equal(weight, right["weights"][name]), name


@pytest.mark.parametrize(
    "train",
    [
        {"recompute": "full", "recompute_layers": 2},
        {"recompute": "full", "recompute_offload": True},
        {"recompute": "selective"},
    ],
)
def test_recompute_changes_no_bit_of_a_run(pool, data, plain, tmp_path, train):
    values = tiny_config(data, model=DROPOUT, train=train)
    assert_equal(plain, pool.run(run_training, 1, tmp_path, values)[0])


def recompute_of_each_part(run_dir, values):
    return [
        (part.recompute_layers, part.recompute_offload) for part in make_job(run_dir, values).model.decoders
    ]


@pytest.mark.parametrize("offload", [False, True])
def test_every_part_of_a_model_recomputes_as_it_is_told(pool, data, tmp_path, offload):
    train = {"recompute": "full", "recompute_layers": 2, "recompute_offload": offload}
    values = tiny_config(data, train=train, parallel={"pp": 2})
    assert pool.run(recompute_of_each_part, 2, tmp_path, values) == [[(2, offload)]] * 2


@pytest.mark.parametrize(
    "train", every(2, [{"recompute": "full", "recompute_layers": 2}, {"recompute": "selective"}])
)
def test_recompute_and_documents_resume_bit_for_bit_on_two_processes(pool, data, plain, tmp_path, train):
    values = tiny_config(data, model=DROPOUT, train=train, data=APART)
    whole = pool.run(run_training, 2, tmp_path / "whole", values)[0]
    halted = values | {"runtime": {**values["runtime"], "stop_after": 3}}
    assert not pool.run(run_training, 2, tmp_path / "parts", halted)[0]["done"]
    assert_equal(whole, pool.run(run_training, 2, tmp_path / "parts", values)[0])
    assert whole["losses"] != plain["losses"]


def test_documents_kept_apart_have_one_curve_under_every_layout(pool, data, tmp_path):
    runs = [
        pool.run(
            run_training, ranks, tmp_path / str(ranks), tiny_config(data, data=APART, eval={"every": 5})
        )[0]
        for ranks in (1, 2)
    ]
    np.testing.assert_allclose(runs[1]["losses"], runs[0]["losses"], rtol=2e-6)
    together = pool.run(
        run_training, 1, tmp_path / "together", tiny_config(data, data=APART | {"reset_documents": False})
    )[0]
    assert together["losses"] != runs[0]["losses"]
    tests = [line["test_loss"] for run in runs for line in run["lines"] if "test_loss" in line]
    assert tests[0] == pytest.approx(tests[1], rel=1e-6)


def test_a_run_does_not_go_on_with_documents_treated_otherwise(pool, data, tmp_path):
    pool.run(run_training, 1, tmp_path, tiny_config(data))
    with pytest.raises(AssertionError, match=r"data\.reset_documents was False, now True"):
        pool.run(run_training, 1, tmp_path, tiny_config(data, data=APART))
