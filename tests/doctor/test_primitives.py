"""Every operation between two real processes; and what is said of one that is wrong, missing or hangs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.doctor import command, machine, primitives
from shoal.doctor.primitives import OPERATIONS, judge, try_all, try_on
from tests.mpirun import needs_mpi


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=[needs_mpi, pytest.mark.proof])])
def test_a_cpus_back_ends_do_all_of_them(backend):
    outcomes = try_on(backend, "cpu")
    assert list(outcomes) == list(OPERATIONS)
    assert {outcome["status"] for outcome in outcomes.values()} == {"works"}
    assert all(outcome["ms"] > 0 for outcome in outcomes.values())
    finding = judge({f"{backend} cpu": outcomes})
    assert (finding.status, finding.fact) == ("ok", f"{len(OPERATIONS)} of {len(OPERATIONS)} work")


def test_gpus_and_an_mpi_add_their_back_ends(monkeypatch):
    monkeypatch.setattr(primitives, "try_on", lambda backend, device: {})
    for mpirun, more in (("", []), ("/usr/bin/mpirun", ["mpi cpu"])):
        monkeypatch.setattr(primitives, "find_mpirun", lambda mpirun=mpirun: mpirun)
        assert list(try_all(num_gpus=0)) == ["gloo cpu", *more]
        assert list(try_all(num_gpus=1)) == ["gloo cpu", "gloo cuda", *more]
        assert list(try_all(num_gpus=2)) == ["gloo cpu", "gloo cuda", "nccl cuda", *more]


def rank(code):
    """Return the command of a rank that does something else than try."""
    return [sys.executable, "-c", f"import json, os\nrank = int(os.environ['RANK'])\n{code}"]


def test_the_worst_of_the_ranks_counts():
    outcomes = try_on(
        "gloo",
        "cpu",
        rank(
            "for name, last in (('reduce', 'works'), ('gather', 'wrong')):\n"
            "    print(json.dumps({'rank': rank, 'operation': name, 'status': last if rank else 'works'}))"
        ),
    )
    told = {name: outcome["status"] for name, outcome in outcomes.items()}
    assert told == {"reduce": "works", "gather": "wrong"}


def test_a_rank_that_dies_is_said_after_what_it_had_done():
    told = "{'rank': rank, 'operation': 'reduce', 'status': 'works'}"
    die = f"print(json.dumps({told}))\nraise ValueError('no memory')"
    outcomes = try_on("gloo", "cpu", rank(die))
    assert outcomes["reduce"]["status"] == "works"
    assert outcomes["end"] == {"status": "wrong", "why": "ValueError: no memory"}


@pytest.mark.proof
def test_a_lost_connection_is_a_fault_and_a_refusal_is_none():
    """One rank is enough: the outcome of an operation is that of the worst."""
    fail = (
        "import shoal.doctor.primitives as p\n"
        "def refuse(self): raise RuntimeError('no such kernel')\n"
        "def lose(self): raise RuntimeError('Connection closed by peer')\n"
        "p.OPERATIONS = ('broadcast', 'reduce', 'gather')\n"
        "p._Trials.reduce, p._Trials.gather = refuse, lose\n"
        "p.try_as_rank('gloo', 'cpu')"
    )
    outcomes = try_on("gloo", "cpu", rank(fail))
    assert outcomes["broadcast"]["status"] == "works"
    assert "no such kernel" in outcomes["reduce"]["why"]
    assert judge({"gloo cpu": outcomes}).status == "problem"
    assert "Connection closed by peer" in outcomes.pop("end")["why"]
    assert judge({"gloo cpu": outcomes}).status == "ok"


def test_ranks_that_hang_are_given_up(monkeypatch):
    def hang(words, size):
        raise subprocess.TimeoutExpired(words, 1)

    monkeypatch.setattr(primitives, "run_ranks", hang)
    assert try_on("gloo", "cpu") == {"start": {"status": "wrong", "why": "the ranks hung"}}


@pytest.mark.proof
@needs_mpi
def test_ranks_of_an_mpi_that_hang_are_ended_too(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "START_LIMIT_S", 8.0)
    note = f"open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w'); import time; time.sleep(60)"
    hang = [sys.executable, "-c", f"import os; {note}"]
    assert try_on("mpi", "cpu", hang) == {"start": {"status": "wrong", "why": "the ranks hung"}}
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(Path("/proc", pid).exists() for pid in pids):
        assert time.monotonic() < until, "a rank goes on"
        time.sleep(0.1)


def test_an_mpi_that_does_not_work_is_a_warning_unless_more_is_wrong():
    wrong = {"end": {"status": "wrong", "why": "no slots"}}
    assert judge({"mpi cpu": wrong}).status == "warning"
    assert "mpi4py" in judge({"mpi cpu": wrong}).advice
    assert judge({"mpi cpu": wrong}).fact == "0 of 1 work; wrong: end on mpi cpu (no slots)"
    assert judge({"mpi cpu": wrong, "gloo cpu": wrong}).status == "problem"


@pytest.mark.parametrize(("status", "judged"), [("unsupported", "ok"), ("wrong", "problem")])
def test_what_does_not_work_is_named(status, judged, capsys):
    matrix = {"gloo cuda": {"reduce": {"status": "works", "ms": 2.0}, "gather": {"status": status}}}
    finding = judge(matrix)
    assert finding.status == judged
    assert finding.fact == f"1 of 2 work; {status}: gather on gloo cuda"
    command.Console().print(command._operations(matrix))
    table = capsys.readouterr().out
    assert "2.0 ms" in table
    assert status in table
