"""Strategies that exchange gradients, in real runs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shoal.checkpoint.tensors import load_weights
from shoal.config.layout import parse_layout, settings_of
from shoal.config.sections import Model
from shoal.models.decoder import Decoder
from shoal.models.shape import resolve_shape
from shoal.train.saving import resume
from shoal.train.step import update
from tests.tiny_dataset import VOCAB_SIZE
from tests.train.ranks import TINY, equal, make_job, result_of, run_training, tiny_config

FOUR = {"train": {"steps": 4}, "sync": {"strategy": "onebit", "block": 128, "warmup_steps": 1}}


@pytest.fixture(scope="module")
def plain(pool, data, tmp_path_factory):
    return pool.run(run_training, 2, tmp_path_factory.mktemp("plain"), tiny_config(data))[0]


def test_an_all_reduce_of_ours_gives_the_losses_of_the_back_ends(pool, data, plain, tmp_path):
    values = tiny_config(data, sync={"algorithm": "hierarchical"}, optimizer={"lr": 1e-2})
    ours = pool.run(run_training, 2, tmp_path, values)[0]
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=2e-6)
    np.testing.assert_allclose(ours["norms"], plain["norms"], rtol=2e-6)
    weights = sum(weight.size for weight in ours["weights"].values())
    assert [line["sync_bytes"] for line in ours["lines"] if "loss" in line] == [4 * weights] * 5
    assert not any("sync_bytes" in line for line in plain["lines"])


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        ("dp2", "int8"),
        ("dp2*zero2x2", "topk"),
        ("dp2*tp2", "onebit"),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in (("dp2", "bf16"), ("dp2*tp2+sp", "powersgd"), ("pp2*dp2", "onebit"))
        ),
    ],
)
def test_replicas_and_tensor_ranks_stay_alike(pool, data, plain, tmp_path, words, strategy):
    layout = parse_layout(words)
    sync = {"strategy": strategy} | ({"block": 128} if strategy == "onebit" else {})
    values = tiny_config(data, parallel=settings_of(layout), sync=sync)
    ranks = pool.run(run_training, layout.world_size, tmp_path, values)
    known = {}  # whole weights: put together from the shards of each replica
    for rank in ranks:
        for name, weight in rank["weights"].items():
            assert np.array_equal(weight, known.setdefault(name, weight)), name
    assert ranks[0]["losses"] != plain["losses"]
    np.testing.assert_allclose(ranks[0]["losses"][-1], plain["losses"][-1], rtol=0.05)


@pytest.fixture(scope="module")
def stopped(pool, data, tmp_path_factory):
    """A run of four steps that was stopped after two; what it would have come to."""
    folder = tmp_path_factory.mktemp("onebit")
    whole = pool.run(run_training, 2, folder / "whole", tiny_config(data, **FOUR))[0]
    pool.run(run_training, 2, folder / "parts", tiny_config(data, **FOUR, runtime={"stop_after": 2}))
    return folder / "parts", whole


def residual_of(run_dir, values):
    """Resume; return what this rank holds back."""
    job = make_job(run_dir, values)
    job.replicas.start(resume(job))
    return {name: tensor.numpy().copy() for name, tensor in job.model.exchange.state().items()}


def test_error_feedback_survives_a_restart(pool, data, stopped):
    parts, whole = stopped
    two, four = (pool.run(residual_of, size, parts, tiny_config(data, **FOUR)) for size in (2, 4))
    for name, residual in two[0].items():
        assert residual.any(), name
        assert np.array_equal(sum(rank[name] for rank in four), residual + two[1][name])
        assert not four[3][name].any()
    equal(pool.run(run_training, 2, parts, tiny_config(data, **FOUR))[0], whole)


def test_a_checkpoint_of_one_strategy_serves_others(pool, data, stopped):
    parts, _ = stopped
    for sync in ({}, {"strategy": "powersgd"}):
        values = tiny_config(data, train={"steps": 5}, sync=sync)
        job = pool.run(residual_of, 2, parts, values)[0]
        assert not any(residual.any() for residual in job.values())
    load_weights(parts, Decoder(resolve_shape(Model(**TINY["model"]), VOCAB_SIZE)))


def test_a_step_that_is_left_out_leaves_no_error_feedback(pool, data, tmp_path):
    values = tiny_config(data, sync={"strategy": "onebit"}, guard={"nonfinite": "skip"})
    for rank in pool.run(with_an_overflow, 2, tmp_path, values):
        assert rank == [(False, False), (True, True)]


def with_an_overflow(run_dir, values):
    """Take a step whose norm is said to overflow, and a good one: was it taken, is anything held back?"""
    job = make_job(run_dir, values)
    seen = []
    for step, overflow in ((1, math.inf), (2, 0.0)):
        result = result_of(job, step)
        applied = update(job, replace(result, grad_norm=result.grad_norm + overflow))
        residuals = job.model.exchange.state().values()
        seen.append((applied, any(bool(residual.any()) for residual in residuals)))
    return seen


@pytest.mark.parametrize("sync", [{"algorithm": "chunked_ring"}, {"strategy": "bf16"}])
def test_a_slow_link_between_two_halves_of_the_ranks_takes_its_time(pool, data, tmp_path, sync):
    values = tiny_config(data, sync=sync, train={"steps": 3})
    values["runtime"] |= {"slow_link": 4.0}
    run = pool.run(run_training, 2, tmp_path, values)[0]
    steps = [line for line in run["lines"] if "loss" in line]
    assert len(steps) == 3
    assert all(line["seconds"] >= line["sync_bytes"] / 500_000 > 0.05 for line in steps)
