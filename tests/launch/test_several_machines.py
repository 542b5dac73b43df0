"""Two hosts with two ranks each: real launchers in two network namespaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from shoal.bench.hosts import NAMES
from shoal.cli.checkpoint import gather_parts
from shoal.errors import CheckpointError
from shoal.infer.load import load_text_model
from tests.launch.hosts import SIZES, Job
from tests.tiny_dataset import random_dataset
from tests.train.commands import shoal
from tests.two_hosts import two_hosts

__all__ = ["two_hosts"]  # a fixture

# layout -> what it adds to the command line; tensor ranks are neighbours, so tp lies inside each host
LAYOUTS = {"dp4": (), "dp2*tp2": ("--parallel.tp", "2")}


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("layout", [pytest.param("dp4", marks=pytest.mark.proof), "dp2*tp2"])
def test_two_hosts_train_as_one_process_does(two_hosts, data, tmp_path, layout):
    run = tmp_path / "run"
    job = Job(two_hosts, data, run, tmp_path, "--train.steps", "5", *LAYOUTS[layout])
    (north_status, north), (south_status, south) = (job.end(name) for name in NAMES)
    assert (north_status, south_status) == (0, 0), north + south
    assert "2 hosts meet at 10.77.0.1:29400: north, south; this is node 0, ranks 0 to 1" in north
    assert "this is node 1, ranks 2 to 3; rank 0 tells how it goes, on node 0" in south
    assert "step 5: test loss" in north
    assert shoal(data, tmp_path / "alone", *SIZES, "--train.steps", "5")[0] == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=2e-6)


@pytest.mark.proof
@pytest.mark.parametrize("shared", [True, False], ids=["shared-folder", "folders-apart"])
def test_a_host_that_is_killed_is_named_and_training_goes_on_when_it_is_back(
    two_hosts, data, tmp_path, shared
):
    """Tensor parallelism inside each host, data parallelism across."""
    run = tmp_path / "run" if shared else Path("run")  # of each host's own folder
    metrics = tmp_path / "north" / run / "metrics.jsonl"
    options = ("--train.steps", "100000", "--checkpoint.every", "10", *LAYOUTS["dp2*tp2"])
    job = Job(two_hosts, data, run, tmp_path, *options)
    job.wait_for_step(metrics, 25)
    two_hosts.kill("south")
    killed = time.monotonic()
    status, screen = job.end("north")
    assert status == 1
    assert time.monotonic() - killed < 30
    last = screen.splitlines()[-3:]
    lost = "error: host south (node 1) is lost: nothing is heard from its launcher any more; rank"
    assert last[0].startswith(lost)
    assert "run the same command on every host" in last[1]
    for name in reversed(NAMES):
        job.start(name, "--stop-after", "40")
    ends = {name: job.end(name) for name in NAMES}
    assert [status for status, _ in ends.values()] == [75, 75], ends
    assert re.search("resumed from step-000000[12]0", ends["north"][1])  # 20 may have been in the making
    assert "stopped after step 40" in ends["north"][1]


@pytest.mark.proof
def test_hosts_with_folders_of_their_own_keep_parts_and_a_lost_one_is_named(two_hosts, data, tmp_path):
    options = ("--train.steps", "6", "--checkpoint.every", "0", *LAYOUTS["dp2*tp2"])
    job = Job(two_hosts, data, "run", tmp_path, *options, "--stop-after", "3")
    assert [job.end(name)[0] for name in NAMES] == [75, 75]
    north, south = (tmp_path / name / "run" for name in NAMES)
    with pytest.raises(CheckpointError, match="one host's part of a checkpoint: host south has model/shard"):
        load_text_model(north, torch.device("cpu"))
    south.rename(tmp_path / "lost")
    job = Job(two_hosts, data, "run", tmp_path, *options)
    for name in NAMES:
        status, screen = job.end(name)
        assert status == 1
        assert re.search(r"of step-00000003, host south has model/shard-\S+, .*bring that host", screen, re.S)
    shutil.rmtree(south)
    (tmp_path / "lost").rename(south)
    job = Job(two_hosts, data, "run", tmp_path, *options)
    assert [job.end(name)[0] for name in NAMES] == [0, 0]
    assert shoal(data, tmp_path / "alone", *SIZES, "--train.steps", "6")[0] == 0
    assert losses(north) == pytest.approx(losses(tmp_path / "alone"), rel=2e-6)
    assert gather_parts(north, (south,)) == 0
    load_text_model(north, torch.device("cpu"))


@pytest.mark.proof
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_rank_restarts_the_ranks_of_all_hosts(two_hosts, data, tmp_path, name):
    run = tmp_path / "run"
    job = Job(two_hosts, data, run, tmp_path, "--train.steps", "200", "--checkpoint.every", "10")
    job.wait_for_step(run / "metrics.jsonl", 15)
    while not (run / "checkpoints/LATEST").exists():
        time.sleep(0.05)
    rank = 2 * NAMES.index(name)
    os.kill(int((run / f"ranks/rank-{rank}/pid").read_text()), signal.SIGKILL)
    ends = {host: job.end(host) for host in NAMES}
    assert [status for status, _ in ends.values()] == [0, 0], ends
    for _, screen in ends.values():
        assert f"host {name}: rank {rank} was killed by signal 9 (SIGKILL)" in screen
        assert "(restart 1 of 3)" in screen
    assert "(restart 1)" in ends["north"][1]


@pytest.mark.proof
@pytest.mark.parametrize("name", NAMES)
def test_a_signal_to_one_host_stops_all_with_everything_saved(two_hosts, data, tmp_path, name):
    run = tmp_path / "run"
    job = Job(two_hosts, data, run, tmp_path, "--train.steps", "100000", "--checkpoint.every", "0")
    job.wait_for_step(run / "metrics.jsonl", 5)
    job.processes[name].send_signal(signal.SIGTERM)
    ends = {host: job.end(host) for host in NAMES}
    assert [status for status, _ in ends.values()] == [75, 75], ends
    assert "all is saved" in ends["north"][1]


@pytest.mark.proof
def test_a_cable_that_is_pulled_ends_both_hosts_each_naming_the_other(two_hosts, data, tmp_path):
    run = tmp_path / "run"
    job = Job(two_hosts, data, run, tmp_path, "--train.steps", "100000")
    job.wait_for_step(run / "metrics.jsonl", 5)
    two_hosts.unplug()
    pulled = time.monotonic()
    ends = {host: job.end(host) for host in NAMES}
    assert time.monotonic() - pulled < 45
    assert [status for status, _ in ends.values()] == [1, 1], ends
    for here, there, ranks in (("north", "south (node 1)", "01"), ("south", "north (node 0)", "23")):
        lost = re.escape(f"error: host {there} is lost: nothing is heard from its launcher any more")
        wait = rf"; (ranks {'-'.join(ranks)} wait|rank [{ranks}] waits) in "  # alike, or each elsewhere
        assert re.search(lost + wait, "".join(ends[here][1].splitlines()[-3:]))


@pytest.mark.proof
def test_other_data_on_one_host_is_refused_by_its_name(two_hosts, data, tmp_path):
    for name, seed in zip(NAMES, (0, 1), strict=True):
        random_dataset(tmp_path / name / "walk", seed=seed)
    job = Job(two_hosts, Path("walk"), tmp_path / "run", tmp_path)
    ends = {host: job.end(host) for host in NAMES}
    assert [status for status, _ in ends.values()] == [2, 2], ends
    for _, screen in ends.values():
        assert re.search(r"dataset 0 differs: \w+ on north \(rank 0\); \w+ on south \(rank 2\)", screen), (
            screen
        )
