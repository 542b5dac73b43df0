"""The other collectives between threads, from and to every rank, with tensors of uneven length."""

import time

import pytest
import torch

from shoal.comm import collectives
from shoal.comm.thread_transport import run_ranks
from shoal.errors import InputError
from shoal.plan.link_cost import collective_cost

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
        collectives.reduce(transport, tensor, root, operation)
        return tensor

    total = sum(of(rank) for rank in range(size))
    assert torch.equal(run_ranks(size, work)[root], total / size if operation == "average" else total)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(size):
    def work(transport):
        tensors = [of(transport.rank, length) for length in range(size)]
        output = torch.empty(transport.rank, dtype=torch.float64)
        collectives.reduce_scatter(transport, output, tensors)
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

    def work(transport):
        if transport.rank == size - 1:
            time.sleep(0.2)
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
    with pytest.raises(TimeoutError, match=r"no matching operation within 0\.1 s"):
        run_ranks(2, lambda transport: transport.recv(torch.empty(1), 1 - transport.rank), timeout_s=0.1)


def test_the_error_that_made_others_wait_is_the_one_raised():
    def work(transport):
        if transport.rank == 1:
            raise ValueError("rank 1 is broken")
        transport.recv(torch.empty(1), 1)

    with pytest.raises(ValueError, match="rank 1 is broken"):
        run_ranks(2, work, timeout_s=0.2)


def test_tensors_that_cannot_travel_are_refused():
    with pytest.raises(InputError, match="on cpu, not contiguous, cannot be sent over ThreadTransport"):
        run_ranks(2, lambda transport: transport.send(torch.ones(2, 3).t(), 1 - transport.rank))
    with pytest.raises(InputError, match="on meta, contiguous, cannot be sent over ThreadTransport"):
        run_ranks(2, lambda transport: transport.send(torch.ones(2, device="meta"), 1 - transport.rank))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("broadcast", lambda t, x, parts, many: collectives.broadcast(t, x, 0)),
        ("reduce", lambda t, x, parts, many: collectives.reduce(t, x, 0)),
        ("reduce_scatter", lambda t, x, parts, many: collectives.reduce_scatter(t, parts[0].clone(), parts)),
        ("all_gather", lambda t, x, parts, many: collectives.all_gather(t, many, x)),
        ("gather", lambda t, x, parts, many: collectives.gather(t, many if t.rank == 0 else [], x, 0)),
        ("scatter", lambda t, x, parts, many: collectives.scatter(t, x, many if t.rank == 0 else [], 0)),
        (
            "all_to_all",
            lambda t, x, parts, many: collectives.all_to_all(t, [p.clone() for p in parts], parts),
        ),
        ("barrier", lambda t, x, parts, many: collectives.barrier(t)),
    ],
)
def test_costs_are_those_of_the_busiest_rank(name, call, size):
    numel = 60

    def work(transport):
        tensor = torch.ones(numel, dtype=torch.float64)
        many = [torch.ones(numel, dtype=torch.float64) for _ in range(size)]
        call(transport, tensor, list(tensor.clone().split(numel // size)), many)
        return transport.traffic.num_bytes

    sent = run_ranks(size, work)
    cost = collective_cost(name, size, numel * 8)
    if name in ("reduce", "gather"):  # the root receives what the others send: a tensor a level, or from each
        assert sum(sent) == (size - 1) * numel * 8
        assert cost.num_bytes == cost.num_rounds * numel * 8
    else:
        assert max(sent) == cost.num_bytes


def test_tensors_arrive_in_the_order_in_which_they_were_sent():
    def work(transport):
        if transport.rank == 0:
            leaving = [transport.isend(of(number), 1) for number in range(3)]
            for one in leaving:
                one.wait()
            return []
        received = [torch.empty(3, dtype=torch.float64) for _ in range(3)]
        arriving = [transport.irecv(tensor, 0) for tensor in received]
        for one in reversed(arriving):
            one.wait()
        return received

    assert all(torch.equal(tensor, of(number)) for number, tensor in enumerate(run_ranks(2, work)[1]))
