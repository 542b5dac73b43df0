"""`shoal bench collectives`: the columns of nccl-tests, wrong results counted, times against formulas."""

import json
import re
import subprocess
import sys

import pytest
import torch

from shoal.bench import collectives
from shoal.bench.collectives import CollectivesOptions, CollectivesRow, measure
from shoal.bench.ranks import _hosts, on_ranks
from shoal.bench.sizes import in_words, parse_bytes
from shoal.comm.all_reduce import ALGORITHMS
from shoal.comm.thread_transport import run_ranks
from shoal.config.sections import Runtime
from shoal.errors import InputError
from shoal.plan.link_cost import Cost
from shoal.runtime.rank_info import RankInfo
from tests import commands
from tests.mpirun import mpirun, needs_mpi


def shoal(*words):
    return commands.run("bench", "collectives", *words)


def test_all_algorithms_on_two_processes(tmp_path):
    record, picture = tmp_path / "record.json", tmp_path / "picture.png"
    done = shoal("--nproc", 2, "--sizes", "16KB", "256KB", "--json", record, "--plot", picture)
    assert done.returncode == 0, done.stderr
    for heading in ("size", "count", "algbw", "busbw", "type", "#wrong", "formula"):
        assert heading in done.stdout
    assert re.search(r"\(ms\) +\(GB/s\) +\(GB/s\) +#wrong +\(ms\)", done.stdout)
    told = json.loads(record.read_text())
    assert (told["ranks"], told["dtype"], told["transport"]) == (2, "float32", "torch")
    assert told["name"] == "collectives"
    assert told["versions"]["torch"] == torch.__version__
    assert [row["size"] for row in told["rows"][::5]] == [1 << 14, 1 << 16, 1 << 18]
    assert {row["algorithm"] for row in told["rows"]} == set(ALGORITHMS) - {"hierarchical"}
    for row in told["rows"]:
        assert row["wrong"] == 0
        assert row["count"] * 4 == row["size"]
        assert row["algbw_bytes_per_s"] == pytest.approx(row["size"] / row["time_s"])
    assert told["links"]["backend"] is None  # no formula: it is torch's
    assert told["links"].keys() == set(ALGORITHMS) - {"hierarchical"}
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_mpi
@pytest.mark.proof
def test_ranks_that_mpirun_started_report_once(tmp_path):
    record = tmp_path / "record.json"
    words = ("--transport", "mpi", "--sizes", "1KB", "16KB", "--dtype", "bfloat16", "--json", record)
    done = mpirun(4, "-m", "shoal", "bench", "collectives", *words)
    assert done.returncode == 0, done.stderr
    assert "backend is skipped: MPI cannot add tensors of torch.bfloat16" in done.stderr
    assert done.stdout.count("all-reduce on 4 ranks") == 1
    told = json.loads(record.read_text())
    assert (told["ranks"], told["transport"], sum(row["wrong"] for row in told["rows"])) == (4, "mpi", 0)


@pytest.mark.proof
def test_ranks_of_torchrun_are_taken():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    words = [*torchrun, "shoal", "bench", "collectives", "--sizes", "1KB", "4KB"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all-reduce on 2 ranks") == 1


def test_another_number_than_the_launchers_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = shoal("--nproc", "4")
    assert done.returncode == 2
    assert "--nproc 4, but a launcher started 2 processes" in done.stderr


def test_ranks_that_began_to_count_together_are_on_one_host():
    def work(transport):
        return _hosts(transport, RankInfo(transport.rank, 5, local_rank=transport.rank % 3))

    assert run_ranks(5, work) == [[[0, 1, 2], [3, 4]]] * 5


def test_bus_bandwidth_is_what_the_best_algorithm_sends():
    row = CollectivesRow("tree", 1000, 250, 0.5, 0, 4, (4,))
    assert row.algorithm_bandwidth == 2000
    assert row.bus_bandwidth == 3000


def test_wrong_elements_of_all_ranks_are_counted(monkeypatch):
    honest = collectives.all_reduce

    def off_by_one(transport, tensor, operation="sum", algorithm="tree"):
        honest(transport, tensor, operation, algorithm)
        if algorithm == "chunked_ring" and transport.rank == 1:
            tensor[:3] += 1

    monkeypatch.setattr(collectives, "all_reduce", off_by_one)
    ask = CollectivesOptions(("chunked_ring", "ring"), (400,), "float32")
    rows = run_ranks(3, lambda transport: measure(transport, lambda word: None, ask))[0]
    assert [(row.algorithm, row.wrong) for row in rows] == [("chunked_ring", 3), ("ring", 0)]


def test_between_hosts_the_tree_inside_and_the_ring_across_are_measured_and_have_a_formula():
    def work(transport):
        transport.hosts = [[0, 1, 2], [3]]
        return measure(transport, lambda word: None, CollectivesOptions((), (4000, 400_000), "float32"))

    rows = run_ranks(4, work)[0]
    found = [row for row in rows if row.algorithm == "hierarchical"]
    assert [(row.num_bytes, row.wrong, row.hosts) for row in found] == [
        (4000, 0, (3, 1)),
        (400_000, 0, (3, 1)),
    ]
    assert collectives._cost(found[0]) == Cost(num_rounds=6, num_bytes=5 * 4000)
    assert "backend" not in {row.algorithm for row in rows}  # threads have none


def test_a_wrong_result_is_a_failure(monkeypatch, capsys):
    rows = [
        CollectivesRow("ring", 1000, 250, 0.5, 2, 2, (2,)),
        CollectivesRow("ring", 4000, 1000, 0.9, 0, 2, (2,)),
    ]
    monkeypatch.setattr(collectives, "on_ranks", lambda *_: rows)
    assert collectives.command(2, "torch", ("ring",), ("1KB", "4KB"), "float32", None, None) == 1
    assert "ring: fitted latency " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--algorithms", "star"), "unknown all-reduce algorithm 'star'"),
        (("--sizes", "4KB", "1KB"), "the first must be above 0"),
        (("--sizes", "many", "1KB"), "'many' is not a size"),
        (("--nproc", "-1"), "--nproc -1"),
        (("--transport", "mpi"), "--transport mpi must be started by mpirun"),
        (("--json", "nowhere/x.json"), "nowhere/x.json: there is no such folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message):
    done = shoal(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "size"), [("64", 64), ("1KB", 1024), ("1.5 mb", 3 << 19), ("2GB", 2 << 30), ("7B", 7)]
)
def test_sizes_are_read(words, size):
    assert parse_bytes(words) == size


@pytest.mark.parametrize("words", ["", "KB", "-1KB", "1TB", "1e3"])
def test_other_words_are_no_sizes(words):
    with pytest.raises(InputError, match="is not a size"):
        parse_bytes(words)


def test_sizes_are_written_with_their_largest_unit():
    assert [in_words(size) for size in (5, 1024, 1536, 1 << 28)] == ["5 B", "1 KB", "1.5 KB", "256 MB"]


def threads_of(transport, tell):
    return torch.get_num_threads()


def test_ranks_of_a_measurement_have_the_threads_that_are_asked_for():
    assert on_ranks(1, "torch", threads_of, runtime=Runtime(threads=3)) == 3
