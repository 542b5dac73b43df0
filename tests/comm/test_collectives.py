"""The other collectives between threads, from and to every rank, with tensors of uneven length."""

import threading

import pytest
import torch

from shoal.comm import collectives
from shoal.comm.reduction import Reduction
from shoal.comm.thread_transport import run_ranks

SIZES = (1, 2, 3, 4, 5)
ROOTS = [(size, root) for size in SIZES for root in range(size)]


def of(rank, length=3):
    """Make a tensor that says whose it is."""
    return torch.arange(length, dtype=torch.float64) + 100 * rank


@pytest.mark.parametrize(("size", "source"), ROOTS)
def test_broadcast(size, source):
    def work(transport):
        tensor = of(transport.rank)
        collectives.broadcast(transport, tensor, source)
        return tensor, transport.traffic.num_bytes

    answers = run_ranks(size, work)
    assert all(torch.equal(tensor, of(source)) for tensor, _ in answers)
    assert sum(num_bytes for _, num_bytes in answers) == (size - 1) * 24


@pytest.mark.parametrize(("size", "root"), ROOTS)
@pytest.mark.parametrize("operation", ["sum", "average"])
def test_reduce(size, root, operation):
    def work(transport):
        tensor = of(transport.rank)
        collectives.reduce(transport, tensor, root, Reduction(operation, tensor.dtype, size))
        return tensor

    total = sum(of(rank) for rank in range(size))
    assert torch.equal(run_ranks(size, work)[root], total / size if operation == "average" else total)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(size):
    def work(transport):
        tensors = [of(transport.rank, length) for length in range(size)]
        output = torch.empty(transport.rank, dtype=torch.float64)
        collectives.reduce_scatter(transport, output, tensors, Reduction("sum", output.dtype, size))
        return output, [torch.equal(tensor, of(transport.rank, len(tensor))) for tensor in tensors]

    for length, (output, untouched) in enumerate(run_ranks(size, work)):
        assert torch.equal(output, sum(of(rank, length) for rank in range(size)))
        assert all(untouched)


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(size):
    def work(transport):
        outputs = [torch.empty(rank, dtype=torch.float64) for rank in range(size)]
        collectives.all_gather(transport, outputs, of(transport.rank, transport.rank))
        return outputs

    for outputs in run_ranks(size, work):
        assert all(torch.equal(output, of(rank, rank)) for rank, output in enumerate(outputs))


@pytest.mark.parametrize(("size", "root"), ROOTS)
def test_gather_and_scatter(size, root):
    def work(transport):
        at_root = transport.rank == root
        everything = [torch.empty(rank, dtype=torch.float64) for rank in range(size)] if at_root else []
        collectives.gather(transport, everything, of(transport.rank, transport.rank), root)
        assert all(torch.equal(tensor, of(rank, rank)) for rank, tensor in enumerate(everything))
        own = torch.empty(transport.rank, dtype=torch.float64)
        collectives.scatter(transport, own, [2 * tensor for tensor in everything], root)
        return own

    assert all(torch.equal(own, 2 * of(rank, rank)) for rank, own in enumerate(run_ranks(size, work)))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(size):
    def work(transport):
        tensors = [of(transport.rank, to) for to in range(size)]
        outputs = [torch.empty(transport.rank, dtype=torch.float64) for _ in range(size)]
        collectives.all_to_all(transport, outputs, tensors)
        return outputs

    for rank, outputs in enumerate(run_ranks(size, work)):
        assert all(torch.equal(output, of(source, rank)) for source, output in enumerate(outputs))


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_a_barrier_before_all_have_come(size):
    come = []
    late = threading.Event()

    def work(transport):
        if transport.rank == size - 1:
            late.wait(0.2)
        come.append(transport.rank)
        collectives.barrier(transport)
        return len(come)

    assert run_ranks(size, work) == [size] * size


def test_a_group_numbers_its_ranks_and_counts_for_the_whole():
    def work(transport):
        if transport.rank == 1:
            return None
        group = transport.group([3, 0, 2])
        tensor = of(transport.rank)
        collectives.broadcast(group, tensor, 0)
        return group.rank, group.size, tensor, transport.traffic.num_messages

    answers = run_ranks(4, work)
    assert [answer and answer[:2] for answer in answers] == [(1, 3), None, (2, 3), (0, 3)]
    assert all(torch.equal(answer[2], of(3)) for answer in answers if answer)
    assert [answer[3] for answer in answers if answer] == [0, 0, 2]


def test_a_rank_that_waits_for_nothing_says_so():
    with pytest.raises(TimeoutError, match=r"nothing came for 0\.1 s"):
        run_ranks(2, lambda transport: transport.recv(torch.empty(1), 1 - transport.rank), timeout_s=0.1)


def test_tensors_arrive_in_the_order_in_which_they_were_sent():
    def work(transport):
        if transport.rank == 0:
            for number in range(3):
                transport.send(of(number), 1)
            return []
        received = [torch.empty(3, dtype=torch.float64) for _ in range(3)]
        arriving = [transport.irecv(tensor, 0) for tensor in received]
        for one in reversed(arriving):
            one.wait()
        return received

    assert all(torch.equal(tensor, of(number)) for number, tensor in enumerate(run_ranks(2, work)[1]))
