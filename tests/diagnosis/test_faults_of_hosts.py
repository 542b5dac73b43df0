"""Two hosts with two ranks each that hang, disagree or lose the link: one verdict on both screens."""

from __future__ import annotations

import re
import sys
import time

import pytest

from shoal.bench.hosts import NAMES
from tests import commands
from tests.diagnosis.faults import LIMITS, SHAPE, SLEEP, told
from tests.launch.hosts import Job
from tests.train.commands import command
from tests.two_hosts import two_hosts

__all__ = ["two_hosts"]  # a fixture

HANG_S = 5.0
LIMIT = (*LIMITS, "--runtime.hang_s", str(HANG_S))


def unwell(folder, fault, rank, monkeypatch):
    """Have a rank fall ill in step 7, wherever it runs."""
    code = (
        f"import os, time\ndef unwell(step):\n    return step == 7 and os.environ.get('RANK') == '{rank}'\n"
    )
    (folder / "sitecustomize.py").write_text(code + fault)
    monkeypatch.setenv("PYTHONPATH", commands.planted(folder)["PYTHONPATH"])


@pytest.mark.proof
def test_a_hang_is_told_on_both_hosts_with_the_host_that_holds_it_up(two_hosts, data, tmp_path, monkeypatch):
    unwell(tmp_path, SLEEP, 3, monkeypatch)
    job = Job(two_hosts, data, "run", tmp_path, *LIMIT, "--parallel.tp", "2")
    job.wait_for_step(tmp_path / "north/run/metrics.jsonl", 5)
    began = time.monotonic()
    ends = {name: job.end(name) for name in NAMES}
    assert time.monotonic() - began < HANG_S + 30
    assert [status for status, _ in ends.values()] == [1, 1], ends
    north, south = (told(screen.splitlines()) for _, screen in ends.values())
    assert north == south
    assert re.fullmatch(
        r"rank 3 on south is in data of step 7, batch at sitecustomize.py:\d+; ranks 0-1 on north wait in "
        r"all_reduce \d+ in group dp_replicate, gradient bucket 0; rank 2 on south waits in "
        r"all_reduce \d+ in group tp \(.*\)",
        north,
    ), north
    for name in NAMES:  # each host keeps what is known of all ranks
        (folder,) = (tmp_path / name / "run/postmortem").iterdir()
        assert "sitecustomize.py" in (folder / "rank-3.stack.txt").read_text()
        assert (folder / "rank-0.json").exists()


@pytest.mark.proof
def test_ranks_of_two_hosts_that_disagree_are_told_before_any_time_out(
    two_hosts, data, tmp_path, monkeypatch
):
    unwell(tmp_path, SHAPE, 3, monkeypatch)
    began = time.monotonic()
    job = Job(
        two_hosts, data, "run", tmp_path, *LIMIT, "--runtime.hang_s", "100", "--runtime.timeout_s", "200"
    )
    ends = {name: job.end(name) for name in NAMES}
    assert time.monotonic() - began < 60, "only the limit found it"
    for status, screen in ends.values():
        assert status == 1
        assert re.search(
            r"rank 3 on south issued all_reduce \d+ in group control of \[9\] float64 .*, where "
            r"ranks 0-2 issued all_reduce \d+ in group control of \[8\] float64 ",
            told(screen.splitlines()),
        ), screen


@pytest.mark.proof
def test_under_torchrun_each_host_tells_the_same(two_hosts, data, tmp_path, monkeypatch):
    unwell(tmp_path, SLEEP, 3, monkeypatch)
    address, port = two_hosts.rdzv.split(":")
    processes = []
    for node, name in enumerate(NAMES):
        (tmp_path / name).mkdir()
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--nnodes", "2"]
        run += ["--node-rank", str(node), "--master-addr", address, "--master-port", port, "-m"]
        words = command(data, "run", *LIMIT[2:], "--train.micro_batch_size", "2")[2:]
        processes.append(two_hosts.start(name, [*run, *words], tmp_path / name))
    screens = [process.communicate(timeout=90)[0] for process in processes]
    sentence = r"rank 3 on south is in data of step 7, batch at sitecustomize.py:\d+; ranks 0-2 wait in"
    for name, screen in zip(NAMES, screens, strict=True):
        logs = "".join(path.read_text() for path in (tmp_path / name).glob("run/ranks/*/log"))
        assert len(re.findall(sentence, screen + logs)) == 1, screen + logs
