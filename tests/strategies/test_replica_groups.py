"""Replicas that train apart as users meet them: real launchers, a killed one, a stop, shards inside."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from shoal.bench.hosts import NAMES
from shoal.errors import EXIT_STOPPED
from shoal.runtime.log import to_screen
from shoal.runtime.network import Endpoint
from shoal.runtime.startup import SIGNALS
from shoal.runtime.stop import STARTED
from shoal.strategies import replica_groups as groups
from shoal.strategies.replica_groups import ReplicaGroupLauncher
from tests.train.commands import Running, command, same_weights, shoal, weights
from tests.two_hosts import two_hosts

__all__ = ["two_hosts"]  # a fixture

DILOCO = ("--sync.strategy", "diloco", "--train.micro_batch_size", "2", "--checkpoint.every", "0")
DILOCO += ("--train.compile", "off")


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def handlers():
    """Give the process its own signal handlers back."""
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def launcher_of(run, monkeypatch, program, during=lambda: None, **options):
    """Return two replica groups that run a line of Python, with `during` called while each is started."""
    starts = []

    def start(arguments, env, *screen):
        starts.append(env)
        child = subprocess.Popen([sys.executable, "-c", program], env=env)
        during()
        return child

    monkeypatch.setattr(groups.forking, "start", start)
    settings = {"num_replicas": 2, "size": 1, "nproc": 2, "endpoint": Endpoint(), "timeout_s": 5}
    settings["without"] = "the others go on without it"
    return ReplicaGroupLauncher((), run, **{**settings, "max_restarts": 0, **options}), starts


def test_a_signal_while_a_replica_group_is_being_started_stops_that_one_too(tmp_path, monkeypatch, handlers):
    asked = []

    def ask_once():
        if not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))

    found, _ = launcher_of(tmp_path, monkeypatch, "import time; time.sleep(60)", ask_once)
    began = time.monotonic()
    assert found.run() == EXIT_STOPPED
    assert time.monotonic() - began < 20


def test_a_stop_while_a_group_waits_for_its_new_start_leaves_it_ended(tmp_path, monkeypatch, handlers):
    found, starts = launcher_of(tmp_path, monkeypatch, "raise SystemExit(1)", max_restarts=5)
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert found.run() == EXIT_STOPPED
    assert len(starts) == 2


def test_a_lost_group_comes_back_for_some_time_and_the_time_limit_counts_on(tmp_path, monkeypatch, handlers):
    monkeypatch.setattr(groups, "_AGAIN_S", 0.2)
    found, starts = launcher_of(tmp_path, monkeypatch, "raise SystemExit(1)", max_restarts=1)
    told = []
    monkeypatch.setattr(found, "_store", SimpleNamespace(set=lambda *pair: told.append(pair), port=1))
    assert found.run() == 1
    states = [json.loads(text)["state"] for key, text in told if key == "status1"]
    assert states == ["restarting", "lost"]
    assert len({env[STARTED] for env in starts}) == 1
    assert len(starts) == 4


def test_a_store_that_is_gone_ends_the_groups_with_a_sentence(tmp_path, monkeypatch, handlers, capsys):
    found, starts = launcher_of(tmp_path, monkeypatch, "raise SystemExit(1)", max_restarts=5)

    def fail(key, value):
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(found, "_store", SimpleNamespace(set=fail, port=1))
    to_screen()
    assert found.run() == 1
    assert len(starts) == 2
    assert "is gone, and node 0 with it" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "size", "shares"), [(3, 1, "012"), (2, 1, "010"), (2, 2, ["0,1"] * 3)])
def test_replicas_share_gpus_evenly_where_there_are_too_few(tmp_path, monkeypatch, count, size, shares):
    monkeypatch.setattr(groups.torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found, _ = launcher_of(tmp_path, monkeypatch, "", num_replicas=3, size=size, nproc=3 * size)
    assert [found._share(replica)["CUDA_VISIBLE_DEVICES"] for replica in range(3)] == list(shares)


def test_replicas_start_and_end_as_one_command_and_agree(data, tmp_path):
    run = tmp_path / "run"
    arguments = ("--nproc", "2", *DILOCO, "--sync.every", "2", "--train.steps", "4")
    status, screen = shoal(data, run, *arguments)
    assert status == 0, screen
    assert re.search(r"2 replicas of 1 process meet at 127\.0\.0\.1:\d+; here: 0, 1", screen)
    assert "diloco: 2 replicas agree on weights every 2 steps" in screen
    assert [line["step"] for line in lines(run) if "round" in line] == [2, 4]
    assert same_weights(run, run / "replicas/1")


@pytest.mark.proof
def test_a_killed_replica_is_gone_without_and_comes_back_and_all_agree_at_the_end(data, tmp_path):
    run = tmp_path / "run"
    steps = ("--train.steps", "1000000", "--sync.every", "20", "--train.global_batch_size", "6")
    job = Running(data, run, "--nproc", "3", *DILOCO, *steps)
    job.wait_for_step(25, timeout=120)
    os.kill(int((run / "replicas/2/ranks/rank-0/pid").read_text()), signal.SIGKILL)
    incidents = run / "incidents.jsonl"
    until = time.monotonic() + 120
    while "replica 2 joins" not in (incidents.read_text() if incidents.exists() else ""):
        assert time.monotonic() < until
        assert job.process.poll() is None, job.end()[1]
        time.sleep(0.1)
    job.process.send_signal(signal.SIGTERM)
    status, screen = job.end(120)
    assert status == 75, screen
    told = [json.loads(line) for line in incidents.read_text().splitlines()]
    assert [line["kind"] for line in told[:2]] == [
        "replica 2 is lost: 2 of 3 go on",
        "replica 2 joins: 3 of 3 go on",
    ]
    assert "replica 2 is lost: rank 0 was killed by signal 9 (SIGKILL)" in screen
    assert "starting it again (restart 1 of 3)" in screen
    joined = (run / "replicas/2/screen").read_text()
    assert f"joined the other replicas at step {told[1]['step']}: weights and momentum are theirs" in joined
    present = [line["replicas"] for line in lines(run) if "round" in line]
    assert 2 in present
    last = max(int(path.name[-8:]) for path in run.glob("**/checkpoints/step-*"))
    end = str((last // 20 + 2) * 20)
    status, screen = shoal(data, run, "--nproc", "3", *DILOCO, *steps[2:], "--train.steps", end, timeout=120)
    assert status == 0, screen
    assert f"step {end}: test loss" in screen
    for replica in ("1", "2"):
        assert same_weights(run, run / "replicas" / replica)


@pytest.mark.proof
def test_shards_inside_and_drift_across_resume_bit_for_bit(data, tmp_path):
    layout = ("--layout", "dp2*zero2x2", *DILOCO, "--sync.every", "2", "--train.steps", "6")
    assert shoal(data, tmp_path / "whole", *layout, timeout=180)[0] == 0
    status, screen = shoal(data, tmp_path / "parts", *layout, "--stop-after", "3", timeout=180)
    assert status == 75, screen
    assert shoal(data, tmp_path / "parts", *layout, timeout=180)[0] == 0
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    assert same_weights(tmp_path / "parts", tmp_path / "parts/replicas/1")


@pytest.mark.proof
def test_a_bad_replica_is_told_with_its_number_and_the_others_finish(data, tmp_path):
    run = tmp_path / "run"
    (run / "replicas/1").mkdir(parents=True)
    (run / "replicas/1/checkpoints").write_text("")  # where a folder should be
    arguments = ("--nproc", "2", *DILOCO, "--sync.every", "2", "--train.steps", "4", "--max-restarts", "0")
    status, screen = shoal(data, run, *arguments, timeout=120)
    assert status == 0, screen
    assert "replica 1 is lost: rank 0: " in screen
    assert "the others go on without it" in screen
    assert all(np.isfinite(weight).all() for weight in weights(run).values())


@pytest.mark.proof
def test_a_host_with_shards_inside_is_killed_and_comes_back(two_hosts, data, tmp_path):
    options = ("--layout", "dp2*zero2x2", "--nnodes", "2", "--nproc", "2", *DILOCO, "--sync.every", "10")
    job = {}

    def start(name, *more):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        words = command(data, "run", *options, "--node-rank", str(NAMES.index(name)), *more)
        job[name] = two_hosts.start(name, [*words, "--rdzv", two_hosts.rdzv], folder)

    def wait_for(text, path, timeout=180):
        until = time.monotonic() + timeout
        while text not in (path.read_text() if path.exists() else ""):
            assert time.monotonic() < until, f"no {text!r} in time"
            assert job["north"].poll() is None, job["north"].communicate()[0]
            time.sleep(0.2)

    north, south = tmp_path / "north/run", tmp_path / "south/run/replicas/1"
    for name in NAMES:
        start(name, "--train.steps", "100000")
    wait_for('"step": 20, "round": 2, "replicas": 2', north / "metrics.jsonl")
    two_hosts.kill("south")
    wait_for("replica 1 is lost: 1 of 2 go on", north / "incidents.jsonl")
    start("south", "--train.steps", "100000")
    wait_for("replica 1 joins: 2 of 2 go on", north / "incidents.jsonl")
    for name in NAMES:
        job[name].send_signal(signal.SIGTERM)
    ends = {name: job[name].communicate(timeout=120)[0] for name in NAMES}
    assert [job[name].returncode for name in NAMES] == [75, 75], ends
    assert "joined the other replicas at step" in (south / "screen").read_text()
