"""The same algorithms between processes, over gloo and over MPI, beside the libraries' own collectives."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from shoal.comm import all_reduce as algorithms
from shoal.comm import collectives, gloo_transport
from shoal.comm.all_reduce import ALGORITHMS, all_reduce
from shoal.comm.gloo_transport import GlooTransport
from shoal.comm.torch_transport import TorchTransport
from tests.mpirun import mpirun, needs_mpi


def over_gloo(numel):
    """Compare with torch.distributed's own; whole numbers, so that any order of adding is exact."""
    algorithms.SEGMENT_BYTES = 4096  # chunks of several segments, in flight together
    transport = TorchTransport()
    rank, size = transport.rank, transport.size
    tensor = torch.randint(-9, 9, (numel,), generator=torch.Generator().manual_seed(rank)).float()
    expected = tensor.clone()
    dist.all_reduce(expected)
    for algorithm in ALGORITHMS:
        result = tensor.clone()
        all_reduce(transport, result, algorithm=algorithm)
        assert torch.equal(result, expected), algorithm
    gathered, theirs = ([torch.empty(numel) for _ in range(size)] for _ in range(2))
    collectives.all_gather(transport, gathered, tensor)
    dist.all_gather(theirs, tensor)
    assert all(torch.equal(*pair) for pair in zip(gathered, theirs, strict=True))
    collectives.barrier(transport)
    return transport.traffic.num_bytes


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_over_gloo_as_torch_does(pool, size):
    assert all(num_bytes > 0 for num_bytes in pool.run(over_gloo, size, 100_003)) or size == 1


def half_precision_over_gloo():
    results = []
    for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.bool):
        tensor = torch.ones(5, dtype=dtype)
        all_reduce(TorchTransport(), tensor)
        results.append(tensor.float().tolist())
    return results


def test_formats_over_gloo(pool):
    assert pool.run(half_precision_over_gloo, 2)[1] == [[2.0] * 5] * 3 + [[1.0] * 5]


def test_a_time_limit_counts_for_each_segment_so_a_slow_sender_is_not_lost(monkeypatch):
    monkeypatch.setattr(gloo_transport, "_SEGMENT_BYTES", 1000)
    store, sent = dist.HashStore(), torch.arange(4500, dtype=torch.int16).view(torch.uint8)

    def rank(number):
        limits = {"address": "127.0.0.1", "meet_s": 10.0, "timeout_s": 1.0}
        transport = GlooTransport(dist.PrefixStore("slow", store), number, 2, **limits)
        if number == 0:
            arrived = torch.empty_like(sent)
            transport.recv(arrived, 1)
            return arrived
        for part in sent.split(1000):
            time.sleep(0.25)
            transport.send(part, 0)
        return transport

    with ThreadPoolExecutor(2) as threads:
        assert torch.equal(next(threads.map(rank, range(2))), sent)


def test_each_way_between_two_ranks_has_a_connection_of_its_own():
    """Else gloo's announcement of a receive would wait behind what is sent the same way."""
    store, senders = dist.HashStore(), {}

    class Watched:
        def __init__(self, group, way, rank):
            self.group, self.way, self.rank = group, way, rank

        def send(self, parts, to, tag):
            senders.setdefault((self.way, *sorted((self.rank, to))), set()).add(self.rank)
            return self.group.send(parts, to, tag)

        def recv(self, parts, source, tag):
            return self.group.recv(parts, source, tag)

    def rank(number):
        limits = {"address": "127.0.0.1", "meet_s": 10.0, "timeout_s": 10.0}
        transport = GlooTransport(dist.PrefixStore("ways", store), number, 3, **limits)
        assert transport._groups[0] is not transport._groups[1]
        ways = enumerate(transport._groups)
        transport._groups = [Watched(group, way, number) for way, group in ways]
        own = torch.full((5,), float(number))
        for other in {0, 1, 2} - {number}:
            arrived = torch.empty(5)
            transport.exchange(own, other, arrived, other)
            assert arrived.tolist() == [other] * 5
        return transport

    with ThreadPoolExecutor(3) as threads:
        transports = list(threads.map(rank, range(3)))
    assert len(transports) == 3
    assert {pair: len(ranks) for pair, ranks in senders.items()} == dict.fromkeys(senders, 1)
    assert len(senders) == 6


def test_one_that_goes_between_the_two_ways_is_missed_as_soon_as_one_that_never_comes():
    store = dist.HashStore()

    def half(prefix):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(dist.PrefixStore("down", dist.PrefixStore(prefix, store)), 1, 2, options)

    limits = {"address": "127.0.0.1", "meet_s": 1.0, "timeout_s": 40.0}
    for prefix, begin in (("half", half), ("none", lambda prefix: None)):
        before = time.monotonic()
        with ThreadPoolExecutor(1) as thread:
            other = thread.submit(begin, prefix)
            with pytest.raises(RuntimeError):
                GlooTransport(dist.PrefixStore(prefix, store), 0, 2, **limits)
            other.result()
        assert time.monotonic() - before < 20, prefix


@pytest.mark.parametrize(("meet_s", "timeout_s", "late_s"), [(1.0, 30.0, 3.0), (30.0, 1.0, 3.0)])
def test_a_transfer_has_its_own_time_limit_and_not_that_of_the_meeting(meet_s, timeout_s, late_s):
    store, got = dist.HashStore(), torch.zeros(1)
    limits = {"address": "127.0.0.1", "meet_s": meet_s, "timeout_s": timeout_s}

    def rank(number):
        transport = GlooTransport(store, number, 2, **limits)
        if number == 0:
            transport.recv(got, 1)
        else:
            time.sleep(late_s)
            transport.send(torch.ones(1), 0)

    with ThreadPoolExecutor(2) as threads:
        receiver, _ = threads.submit(rank, 0), threads.submit(rank, 1)
        if timeout_s > late_s:
            receiver.result()
            assert got.item() == 1
        else:
            with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
                receiver.result()


MPI_RANK = """
import sys
import torch
from shoal.comm import all_reduce as module
from shoal.comm.all_reduce import ALGORITHMS, all_reduce
from shoal.comm.mpi_transport import world
module.SEGMENT_BYTES = 4096
with world() as transport:
    for algorithm in ALGORITHMS:
        for dtype in (torch.float32, torch.int64 if algorithm == "backend" else torch.bfloat16):
            tensor = torch.full((30_001,), transport.rank + 1, dtype=dtype)
            all_reduce(transport, tensor, algorithm=algorithm)
            assert tensor.eq(sum(range(1, transport.size + 1))).all(), (algorithm, dtype)
    if "fail" in sys.argv and transport.rank == 2:
        raise ValueError("rank 2 is broken")
    all_reduce(transport, tensor)
    print(f"rank {transport.rank} of {transport.size} sent {transport.traffic.num_bytes} bytes")
"""


@needs_mpi
@pytest.mark.proof
def test_four_ranks_over_mpi():
    done = mpirun(4, "-c", MPI_RANK)
    assert done.returncode == 0, done.stderr
    told = sorted(line.split(" sent")[0] for line in done.stdout.splitlines())
    assert told == [f"rank {rank} of 4" for rank in range(4)]


@needs_mpi
@pytest.mark.proof
def test_a_rank_that_fails_ends_all_of_them():
    done = mpirun(4, "-c", MPI_RANK, "fail", timeout=60)
    assert done.returncode != 0
    assert "ValueError: rank 2 is broken" in done.stderr
