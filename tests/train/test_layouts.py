"""Layout never changes the result: losses and gradient norms for any number of processes and micro-steps."""

import json

import numpy as np
import pytest

from shoal.config.layout import parse_layout, settings_of
from tests.cases import every
from tests.train.ranks import refusal_of_poisoned, run_poisoned, run_training, tiny_config

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def reference(pool, data, tmp_path_factory):
    def run(**sections):
        values = tiny_config(data, **sections)
        return pool.run(run_training, 1, tmp_path_factory.mktemp("run"), values)[0]

    return {"plain": run(), "dropout": run(model=DROPOUT)}


# Processes, sequences of a micro-step, and with what they are tried; `make proof` tries each with both.
CUTS = {(1, 16): "dropout", (1, 8): "plain", (2, 8): "plain", (2, 4): "dropout", (2, 2): "plain"}
CUTS |= {(4, 4): "plain", (4, 2): "plain", (4, 1): "dropout"}


@pytest.mark.parametrize(
    ("world_size", "micro", "kind"),
    [
        pytest.param(*cut, kind, marks=[pytest.mark.proof] * (kind != tried))
        for cut, tried in CUTS.items()
        for kind in ("plain", "dropout")
    ],
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


@pytest.mark.parametrize("words", every(2, ["zero3x2", "tp2", "pp2", "dp2"]))
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(pool, data, tmp_path, words):
    parallel = settings_of(parse_layout(words))
    results = pool.run(
        run_poisoned, 2, tmp_path, tiny_config(data, parallel=parallel, guard={"nonfinite": "skip"})
    )
    applied = [line["applied"] for line in results[0]["lines"] if "applied" in line]
    assert applied == [True, True, False, True, True]
    for name, weight in results[0]["weights"].items():
        assert np.isfinite(weight).all()
        assert name not in results[1]["weights"] or np.array_equal(weight, results[1]["weights"][name]), name
    incident = json.loads((tmp_path / "incidents.jsonl").read_text())
    assert (incident["step"], incident["samples"]) == (3, list(range(32, 48)))


def test_a_loss_that_is_not_finite_stops_all_ranks_by_default(pool, data, tmp_path):
    refusals = pool.run(refusal_of_poisoned, 2, tmp_path, tiny_config(data))
    assert all("step 3: loss or gradient norm is not finite" in refusal for refusal in refusals)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_by_one_process_is_plain_training(pool, data, reference, tmp_path, zero):
    got = pool.run(run_training, 1, tmp_path, tiny_config(data, parallel={"zero": zero}))[0]
    assert got["losses"] == reference["plain"]["losses"]
