"""examples/distributed: their work on warm ranks, and run as their first lines say; docs/distributed.md."""

import contextlib
import gzip
import importlib
import io
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.cases import every
from tests.mpirun import mpirun, needs_mpi
from tests.shared import SHARED

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "distributed"
MNIST = SHARED / "data" / "mnist"
needs_digits = pytest.mark.skipif(not MNIST.is_dir(), reason="needs ../shared/data/mnist")


def run(name, *words, launcher=(sys.executable,), **environment):
    done = subprocess.run(
        [*launcher, str(EXAMPLES / name), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONUNBUFFERED": ""} | environment,  # whole lines
    )
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


PROOF = pytest.mark.proof


def work_of(name, arguments):
    """Do a rank's work; return what it prints."""
    sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        work = importlib.import_module(name).work
        work(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), *arguments)
    return printed.getvalue().splitlines()


@pytest.fixture(params=["warm ranks", pytest.param("a script", marks=PROOF)])
def example(request):
    """Run an example by the name, size and arguments of its work, or with these words; return its lines."""

    def on_warm_ranks(name, words, size, *arguments):
        pool = request.getfixturevalue("pool")
        return sorted(line for lines in pool.run(work_of, size, name, arguments) for line in lines)

    def as_a_script(name, words, size, *arguments):
        status, lines, errors = run(f"{name}.py", *words)
        assert status == 0, errors
        return lines

    return as_a_script if request.param == "a script" else on_warm_ranks


@pytest.mark.parametrize("way", every(4, ["environment", "file", "tcp", "store"]))
def test_processes_find_each_other_in_four_ways(way):
    status, lines, errors = run("start.py", "--size", "3", "--way", way)
    assert status == 0, errors
    assert [line.rpartition(",")[0] for line in lines] == [f"rank {n} of 3 on cpu" for n in range(3)]
    assert sorted(line[-9] for line in lines) == ["1", "2", "3"]  # "number N to come"


@PROOF
def test_under_torchrun_its_ranks_are_taken():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    status, lines, errors = run("start.py", launcher=torchrun)
    assert status == 0, errors
    assert [line.rpartition(",")[0] for line in lines] == [f"rank {n} of 2 on cpu" for n in range(2)]


@pytest.mark.proof
@needs_mpi
def test_under_mpirun_its_ranks_are_taken():
    done = mpirun(2, EXAMPLES / "start.py")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.rpartition(",")[0] for line in lines] == [f"rank {n} of 2 on cpu" for n in range(2)]


@pytest.mark.proof
def test_a_rank_that_fails_is_named(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        f"import sys, time\nsys.path.insert(0, {str(EXAMPLES)!r})\nfrom start import run\n"
        "def work(rank, size, device):\n    sys.exit(3) if rank == 1 else time.sleep(60)\n"
        "if __name__ == '__main__':\n    run(work, 2)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "rank 1 failed with status 3" in done.stderr


def test_pairs(example):
    assert example("point_to_point", (), 2) == [
        *("blocking: rank 0 has 1.0", "blocking: rank 1 has 1.0"),
        *("immediate: rank 0 has 1.0", "immediate: rank 1 has 1.0"),
        *("ring: rank 0 has 1.0 of rank 1", "ring: rank 1 has 0.0 of rank 0"),
    ]


def test_pairs_among_four(example):
    lines = example("point_to_point", ("--size", 4), 4)
    assert [line for line in lines if line.startswith("ring")] == [
        f"ring: rank {rank} has {(rank - 1) % 4}.0 of rank {(rank - 1) % 4}" for rank in range(4)
    ]
    assert "immediate: rank 3 has 0.0" in lines


def test_groups(example):
    lines = example("collectives", ("--size", 4), 4)
    ranks = range(4)
    expected = [
        "barrier: all have come",
        "reduce: rank 0 has [10.0]",
        "gather: rank 0 has [1.0, 2.0, 3.0, 4.0]",
    ]
    expected += [f"broadcast: rank {rank} has [1.0]" for rank in ranks]
    for name, value in {"SUM": 10.0, "PRODUCT": 24.0, "MAX": 4.0, "MIN": 1.0}.items():
        expected += [f"all_reduce {name}: rank {rank} has [{value}]" for rank in ranks]
    expected += [f"scatter: rank {rank} has [{10.0 * rank}]" for rank in ranks]
    expected += [f"all_gather: rank {rank} has [1.0, 2.0, 3.0, 4.0]" for rank in ranks]
    expected += [f"reduce_scatter: rank {rank} has [10.0]" for rank in ranks]
    expected += [f"all_to_all: rank {rank} has {[10.0 * n + 10 + rank for n in ranks]}" for rank in ranks]
    expected += [f"all_reduce in a group of two: rank {rank} has [2.0]" for rank in (0, 1)]
    assert lines == sorted(expected)


@pytest.mark.parametrize(("size", "sent"), [(2, ("1.00", "1.00")), (4, ("3.00", "1.50"))])
def test_the_ring_in_chunks_sends_less(example, size, sent):
    lines = example("ring_all_reduce", ("--size", size, "--megabytes", "1"), size, 1)
    assert [re.sub(r" in .*", "", line) for line in lines] == [
        f"chunked_ring: sent {sent[1]} tensors",
        f"ring: sent {sent[0]} tensors",
    ]


@pytest.fixture
def few_digits(tmp_path):
    """The first 700 of MNIST's test part."""
    folder = tmp_path / "digits"
    folder.mkdir()
    for kind, start, each in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
        (path,) = MNIST.glob(f"*{kind}*")
        data = gzip.decompress(path.read_bytes())
        count = (700).to_bytes(4, "big")
        (folder / f"few-{kind}-ubyte").write_bytes(data[:4] + count + data[8 : start + 700 * each])
    return folder


@needs_digits
def test_any_number_of_processes_ends_with_the_same_weights(tmp_path, few_digits, example):
    weights = []
    for size in (1, 2, 4):
        save = tmp_path / f"{size}.pt"
        words = (few_digits, "--size", size, "--epochs", 2, "--dtype", "float64", "--save", save)
        example("data_parallel", words, size, few_digits, 2, torch.float64, save)
        weights.append(torch.load(save, weights_only=True))
    for name, alone in weights[0].items():
        for together in weights[1:]:
            assert (together[name] - alone).norm() <= 1e-10 * alone.norm(), name


@PROOF
@needs_digits
def test_ten_epochs_read_nine_of_ten_digits():
    status, lines, errors = run("data_parallel.py", MNIST, "--size", "2")
    assert status == 0, errors
    assert len([line for line in lines if line.startswith("rank")]) == 20
    assert float(lines[-1].removeprefix("test accuracy ")) >= 0.90


def test_shares_are_disjoint_and_cover_every_batch(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from data_parallel import BATCH, shares

    order = list(range(1000))
    random.Random(1234).shuffle(order)
    for size in (1, 2, 3, 4):
        ranks = [shares(1000, rank, size, epoch=0) for rank in range(size)]
        for number, first in enumerate(range(0, 1000, BATCH)):
            batch = order[first : first + BATCH]
            taken = [sample for rank in ranks for sample in rank[number]]
            assert sorted(taken) == sorted(batch[: len(batch) // size * size])


def test_uneven_parts_end_with_the_weights_that_fit_all_samples_best(monkeypatch, example):
    monkeypatch.syspath_prepend(EXAMPLES)
    from partition import samples

    inputs, targets = samples()
    best = torch.linalg.lstsq(torch.cat([inputs, torch.ones(len(inputs), 1)], 1), targets).solution
    shares = (0.7, 0.2, 0.1)
    lines = example("partition", ("--parts", *shares), 3, shares)
    assert [line.partition(",")[0] for line in lines] == [
        f"rank {rank}: {count} samples" for rank, count in enumerate((700, 200, 100))
    ]
    for line in lines:
        assert [float(word) for word in line.split()[-3:]] == pytest.approx(best[:3, 0].tolist(), abs=1e-4)


def test_parts_are_shuffled_shares_of_their_sizes_that_do_not_overlap(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from partition import DataPartitioner

    data = [10 * n for n in range(19)]
    order = list(range(19))
    random.Random(1234).shuffle(order)
    partitioner = DataPartitioner(data)
    parts = [list(partitioner.use(k)) for k in range(3)]
    assert [len(part) for part in parts] == [13, 3, 1]  # two are left over
    assert [*parts[0], *parts[1], *parts[2]] == [10 * n for n in order[:17]]
    assert len(DataPartitioner(data, (0.5, 0.5)).use(1)) == 9
    with pytest.raises(SystemExit, match="add up to 1 at the most"):
        DataPartitioner(data, (0.7, 0.7))


def test_files_that_are_no_digits_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from data_parallel import read_idx, work

    (tmp_path / "x-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03" + bytes(20))
    with pytest.raises(SystemExit, match="x-images-idx3-ubyte is no IDX file of bytes"):
        read_idx(tmp_path, "images-idx3")
    with pytest.raises(SystemExit, match="holds no \\*labels-idx1\\* file"):
        read_idx(tmp_path, "labels-idx1")
    with pytest.raises(SystemExit, match="a batch of 128 cannot be shared by 3 processes"):
        work(0, 3, torch.device("cpu"), tmp_path, 1, torch.float32, None)


def test_the_page_points_to_files_that_are_there():
    page = (ROOT / "docs" / "distributed.md").read_text()
    links = re.findall(r"\]\(\.\./([^)#]+)\)", page)
    assert {Path(link).name for link in links} >= {path.name for path in EXAMPLES.glob("*.py")}
    assert [link for link in links if not (ROOT / link).exists()] == []
