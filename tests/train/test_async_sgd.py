"""Asynchronous SGD with the real trainer: one worker is plain training, a run resumes, others load it."""

import json
import os
import signal
import time

import numpy as np
import pytest

from shoal.train.metrics import read_metrics
from tests.train.commands import Running, shoal
from tests.train.ranks import run_training, tiny_config
from tests.train.replica_groups import SGD

ASYNC = {"strategy": "async_sgd"}


def close(left, right, **tolerance):
    for name, weight in left["weights"].items():
        np.testing.assert_allclose(right["weights"][name], weight, **tolerance, err_msg=name)


def test_one_worker_is_plain_training_bit_for_bit(pool, data, tmp_path):
    plain = pool.run(run_training, 1, tmp_path / "plain", tiny_config(data))[0]
    alone = pool.run(run_training, 1, tmp_path / "async", tiny_config(data, sync=ASYNC))[0]
    assert alone["losses"] == plain["losses"]
    close(plain, alone, rtol=0, atol=0)
    for name, moments in plain["moments"].items():
        for key, moment in moments.items():
            assert np.array_equal(moment, alone["moments"][name][key]), (name, key)


def test_two_workers_in_step_are_plain_replicas_and_so_is_a_run_that_resumes(pool, apart, data, tmp_path):
    """A save is where all wait for each other, so its step says what is in it."""
    plain = pool.run(run_training, 2, tmp_path / "plain", tiny_config(data, optimizer=SGD))[0]
    values = tiny_config(data, optimizer=SGD, sync=ASYNC | {"staleness": 0})
    first, second = apart(tmp_path / "run", values | {"runtime": {**values["runtime"], "stop_after": 3}})
    assert not first["done"]
    assert not (tmp_path / "run/replicas/1/checkpoints/step-00000003").exists()  # the first one saves for all
    first, second = apart(tmp_path / "run", values)
    assert first["steps"] == second["steps"] == [1, 2, 3, 4, 5]
    close(first, second, rtol=0, atol=0)
    close(plain, first, rtol=2e-5, atol=2e-7)


def test_weights_moments_and_step_survive_into_any_strategy_and_number_of_workers(
    pool, apart, data, tmp_path
):
    values = tiny_config(data, sync=ASYNC, checkpoint={"every": 2}, train={"steps": 3})
    saved = apart(tmp_path, values)[0]
    size = sum(weight.nbytes for weight in saved["weights"].values())
    sent = sum(line.get("sync_bytes", 0) for line in saved["lines"])
    first, *common = [line["staleness"] for line in saved["lines"] if "loss" in line]
    assert first <= 1
    assert common == [0, 0]  # saved after 2, the last one is 3
    assert 2 * size < sent <= 3 * (size + 80)  # three steps; the last answers may be under way still
    state = json.loads((tmp_path / "checkpoints/step-00000003/state.json").read_text())
    assert state["step"] == 3
    loaded = pool.run(run_training, 2, tmp_path, tiny_config(data, train={"steps": 3}))[0]
    close(saved, loaded, rtol=0, atol=0)
    for name, moments in saved["moments"].items():
        assert moments["step"] == 6  # a server's steps: one for each gradient
        for key, moment in moments.items():
            assert np.array_equal(moment, loaded["moments"][name][key]), (name, key)
    four = apart(tmp_path, tiny_config(data, sync=ASYNC, train={"steps": 5}), replicas=4)
    assert four[0]["steps"] == [1, 2, 3, 4, 5]
    assert all(moments["step"] == 6 + 4 * 2 for moments in four[0]["moments"].values())
    for worker in four[1:]:
        assert worker["steps"][-2:] == [4, 5]
        close(four[0], worker, rtol=0, atol=0)
    longer = pool.run(run_training, 2, tmp_path, tiny_config(data, train={"steps": 7}))[0]
    assert longer["steps"] == [1, 2, 3, 4, 5, 6, 7]
    assert longer["losses"][-1] < longer["losses"][0]


def last_of(run):
    """Return a worker's last step, and how many steps it then was ahead of what it had heard."""
    steps = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    return steps[-1]["step"], steps[-1]["staleness"]


def stand_still(folders, seconds):
    """Return where workers are that have not moved on for some seconds."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        seen = [last_of(folder) for folder in folders]
        time.sleep(seconds)
        if seen == [last_of(folder) for folder in folders]:
            return seen
    raise AssertionError(f"they go on: {seen}")


@pytest.mark.proof
def test_a_worker_that_stands_still_holds_nobody_up_before_the_bound_and_one_that_dies_ends_all(
    data, tmp_path
):
    run = tmp_path / "run"
    options = ("--nproc", "2", "--sync.strategy", "async_sgd", "--train.steps", "1000000")
    options += ("--checkpoint.every", "10", "--train.compile", "off", "--train.micro_batch_size", "2")
    options += ("--runtime.timeout_s", "120")
    bound = ("--sync.staleness", "50")
    job = Running(data, run, *options, *bound, "--checkpoint.every", "100000")
    job.wait_for_step(20, timeout=120)
    worker = int((run / "replicas/1/ranks/rank-0/pid").read_text())
    os.kill(worker, signal.SIGSTOP)
    try:
        (first, ahead), (stood, _) = stand_still([run, run / "replicas/1"], 5)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert ahead == 50
    assert first <= stood + 51  # one may be done and not yet written
    job.wait_for_step(stood + 100, timeout=120)
    job.process.send_signal(signal.SIGTERM)
    status, screen = job.end(120)
    assert status == 75, screen
    kept = max(int(path.name[-8:]) for path in run.glob("checkpoints/step-*"))
    assert last_of(run) == last_of(run / "replicas/1") == (kept, 0)
    job = Running(data, run, *options)
    job.wait_for_step(kept + 25, timeout=120)
    os.kill(int((run / "replicas/1/ranks/rank-0/pid").read_text()), signal.SIGKILL)
    status, screen = job.end(120)
    assert status == 1, screen
    assert "worker 1 is lost, and with it the newest weights of its share" in screen
    assert "the others end: it served them" in screen
    status, screen = shoal(data, run, *options, "--stop-after", str(kept + 40), timeout=120)
    assert status == 75, screen
    assert "resumed from step-" in screen


@pytest.mark.proof
def test_with_a_bound_of_four_steps_two_workers_go_four_ahead_of_what_one_that_stands_still_has(
    data, tmp_path
):
    run = tmp_path / "run"
    folders = [run, run / "replicas/1", run / "replicas/2"]
    options = ("--nproc", "3", "--sync.strategy", "async_sgd", "--sync.staleness", "4")
    options += ("--train.steps", "1000000", "--train.global_batch_size", "96")
    options += ("--train.micro_batch_size", "32", "--runtime.timeout_s", "120")
    job = Running(data, run, *options, "--train.compile", "off", "--checkpoint.every", "100000")
    job.wait_for_step(20, timeout=120)
    worker = int((run / "replicas/2/ranks/rank-0/pid").read_text())
    os.kill(worker, signal.SIGSTOP)
    try:
        (first, ahead), (second, ahead_too), (stood, _) = stand_still(folders, 5)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert (ahead, ahead_too) == (4, 4)
    assert max(first, second) <= stood + 5  # one may be done and not yet written
    job.wait_for_step(stood + 40, timeout=120)
    job.process.send_signal(signal.SIGTERM)
    status, screen = job.end(120)
    assert status == 75, screen
