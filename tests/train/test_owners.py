"""One rank updates a weight for all: the result is that of plain all-reduce, and checkpoints are the same."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.config.load import validate
from shoal.models.counts import count_parameters
from shoal.models.shape import resolve_shape
from shoal.train.step import agree, forward_backward, update
from tests.cases import every
from tests.train.ranks import equal, make_job, result_of, run_training, tiny_config
from tests.train.resharding import load_each, save_and_go_on, together

STRATEGIES = ("central_serial", "central_parallel", "device_sharded", "tree_update")
TRAIN = {"steps": 5, "micro_batch_size": 2}  # a rank accumulates, whether there are 1, 2 or 4


def values_of(data, strategy, **sections):
    sections = {"optimizer": {"lr": 1e-3, "clip": 0.5}, "schedule": {"min_lr": 1e-4}, **sections}
    train = TRAIN | sections.pop("train", {})
    return tiny_config(data, model={"dropout": 0.1}, train=train, sync={"strategy": strategy}, **sections)


@pytest.fixture(scope="module")
def plain(pool, data, tmp_path_factory):
    """Return a function that trains by all-reduce on some ranks, once."""
    known = {}

    def run(size, **sections):
        key = size, str(sections)
        if key not in known:
            values = values_of(data, "allreduce", **sections)
            known[key] = pool.run(run_training, size, tmp_path_factory.mktemp("run"), values, timeout=180)[0]
        return known[key]

    return run


def check(ranks, expected):
    assert min(expected["norms"]) > 0.5  # so that all are clipped
    np.testing.assert_allclose(ranks[0]["losses"], expected["losses"], rtol=2e-6)
    np.testing.assert_allclose(ranks[0]["norms"], expected["norms"], rtol=2e-6)
    # All weights as one vector: key biases have no gradient but rounding, which Adam takes for one.
    whole, got = (
        np.concatenate([w.ravel() for w in run["weights"].values()]) for run in (expected, ranks[0])
    )
    assert np.linalg.norm(got - whole) <= 1e-6 * np.linalg.norm(whole)
    for rank in ranks:
        assert all(np.array_equal(w, ranks[0]["weights"][name]) for name, w in rank["weights"].items())


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        *every(2, ((strategy, 2) for strategy in STRATEGIES)),
        *(
            pytest.param(strategy, size, marks=pytest.mark.proof)
            for strategy in STRATEGIES
            for size in (1, 4)
        ),
    ],
)
def test_training_is_that_of_plain_all_reduce(pool, data, plain, tmp_path, strategy, size):
    ranks = pool.run(run_training, size, tmp_path, values_of(data, strategy), timeout=180)
    check(ranks, plain(size))
    sent = {line.get("sync_bytes") for line in ranks[0]["lines"] if "seconds" in line}
    assert sent == {(size - 1) * sum(weight.nbytes for weight in ranks[0]["weights"].values())} or size > 2
    assert not any("sync_bytes" in line for line in plain(size)["lines"])  # the back end's: nobody counts
    every = set(ranks[0]["weights"])
    with_state = [{name for name, state in rank["moments"].items() if state} for rank in ranks]
    if strategy == "device_sharded":
        assert sum(map(len, with_state)) == len(every) == len(set.union(*with_state))
    else:
        assert with_state == [every, *[set()] * (size - 1)]


def test_muon_updates_shares_as_it_does_the_whole(pool, data, plain, tmp_path):
    sections = {"optimizer": {"lr": 1e-3, "clip": 0.5, "name": "muon"}, "train": {"steps": 2}}
    values = values_of(data, "device_sharded", **sections)
    check(pool.run(run_training, 2, tmp_path, values), plain(2, **sections))


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("device_sharded", 2),
        *(pytest.param(strategy, 4, marks=pytest.mark.proof) for strategy in STRATEGIES),
    ],
)
def test_resume_is_bitwise_equal(pool, data, tmp_path, strategy, size):
    values = values_of(data, strategy, train={"steps": 4})
    whole = pool.run(run_training, size, tmp_path / "whole", values)
    halted = values | {"runtime": {**values["runtime"], "stop_after": 2}}
    assert not pool.run(run_training, size, tmp_path / "parts", halted)[0]["done"]
    resumed = pool.run(run_training, size, tmp_path / "parts", values)
    for before, after in zip(whole, resumed, strict=True):
        equal(before, after)


def test_checkpoints_load_under_any_other_strategy_and_back(pool, data, tmp_path):
    """Saved on two ranks by an owner, read by all-reduce on one and on two, and the other way round."""
    saved = {}
    for strategy, size in (("central_serial", 2), ("device_sharded", 2), ("allreduce", 1)):
        folder = tmp_path / f"{strategy}{size}"
        ranks = pool.run(save_and_go_on, size, folder, values_of(data, strategy))
        saved[folder] = together([state for state, _ in ranks]), ranks[0][1]
    for strategy, size in (("allreduce", 1), ("allreduce", 2), ("central_serial", 2), ("device_sharded", 2)):
        values, target = values_of(data, strategy), tmp_path / f"under-{strategy}{size}"
        ranks = pool.run(load_each, size, target, values, list(saved))
        for (state, loss), *loads in zip(saved.values(), *ranks, strict=True):
            loaded = together([part for part, _ in loads])
            assert loaded.keys() == state.keys()
            assert all(np.array_equal(loaded[name], array) for name, array in state.items())
            np.testing.assert_allclose(loads[0][1], loss, rtol=2e-6)


def leave_one_out(run_dir, values):
    """Take a step whose gradient overflows on one rank, then a good one; return whether each was taken."""
    job = make_job(run_dir, values)
    taken = []
    for step in (1, 2):
        batch = job.task.batch(step)
        total = forward_backward(job, batch)
        if step == 1:
            for weight in job.model.updated_weights().values():
                weight.grad.fill_(torch.inf)
        taken.append(update(job, agree(job, batch, total)))
    return taken, {name: p.detach().numpy().copy() for name, p in job.model.named_weights().items()}


def test_a_step_that_is_left_out_is_left_out_by_all(pool, data, tmp_path):
    values = values_of(data, "central_parallel", guard={"nonfinite": "skip"})
    (taken, weights), (also_taken, others) = pool.run(leave_one_out, 2, tmp_path, values)
    assert taken == also_taken == [False, True]
    assert all(np.isfinite(weight).all() for weight in weights.values())
    assert all(np.array_equal(weight, others[name]) for name, weight in weights.items())


def slowed(exchange):
    def run(*args):
        time.sleep(0.1)
        return exchange(*args)

    return run


def traffic_of_a_step(run_dir, values):
    """Return the bytes of the owners' transport, the largest other sum's elements, and both ways' seconds."""
    job, seen = make_job(run_dir, values), []
    owners, honest = job.model.owners, vars(torch.distributed.ProcessGroup)["allreduce"]  # bound as it was
    owners._way = replace(owners._way, collect=slowed(owners._way.collect), spread=slowed(owners._way.spread))
    torch.distributed.ProcessGroup.allreduce = lambda group, tensors, *rest: (
        seen.append(sum(t.numel() for t in tensors)) or honest(group, tensors, *rest)
    )
    try:
        job.clock.begin()
        assert update(job, result_of(job, 1))
        _, phases = job.clock.end().read()
    finally:
        torch.distributed.ProcessGroup.allreduce = honest
    return owners.transport.traffic.num_bytes, max(seen), phases["communication"]


def test_a_step_sends_gradients_once_and_both_ways_are_communication(pool, data, tmp_path):
    ranks = pool.run(traffic_of_a_step, 2, tmp_path, values_of(data, "tree_update"))
    whole = 4 * count_parameters(resolve_shape(validate(values_of(data, "tree_update"), "").model, 257)).total
    for sent, largest, seconds in ranks:
        assert sent == whole  # rank 1 its gradients, rank 0 the weights
        assert largest == 8  # what a step tells all ranks: no tensor went another way
        assert seconds >= 0.2
