"""All-reduce between threads: exact, the same bits on all ranks, and no byte more than the formula."""

import pytest
import torch

from shoal.comm import all_reduce as algorithms
from shoal.comm.all_reduce import ALGORITHMS as WITH_BACKEND
from shoal.comm.all_reduce import all_reduce
from shoal.comm.thread_transport import run_ranks
from shoal.errors import InputError
from shoal.plan.link_cost import all_reduce_cost, hierarchical_cost
from tests.cases import every

ALGORITHMS = [name for name in WITH_BACKEND if name != "backend"]  # threads have none
SIZES = (4, 5, 3, 2, 1)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def tensors_of(size, numel, dtype):
    """Make each rank's tensor, of small whole numbers, whose sums and products are exact in every format."""
    generator = torch.Generator().manual_seed(numel)
    return [torch.randint(1, 3, (numel,), generator=generator).to(dtype) for _ in range(size)]


def reduced(tensors, operation="sum", algorithm="chunked_ring"):
    """Return for each rank what it has after an all-reduce, and what it has sent.

    Hierarchical: between two hosts, whose ranks alternate; an odd number makes one host larger.
    """
    ranks = list(range(len(tensors)))

    def work(transport):
        if algorithm == "hierarchical" and len(ranks) > 1:
            transport.hosts = [ranks[::2], ranks[1::2]]
        tensor = tensors[transport.rank].clone()
        all_reduce(transport, tensor, operation, algorithm)
        return tensor, transport.traffic

    return run_ranks(len(tensors), work)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Let a chunk of some hundred numbers travel in several segments."""
    monkeypatch.setattr(algorithms, "SEGMENT_BYTES", 256)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", every(2, SIZES))
def test_sums_are_exact_for_any_length_and_format(algorithm, size):
    for dtype in (*FLOATS, *WHOLE):
        for numel in (0, 1, size - 1, size, size + 1, 1000):
            tensors = tensors_of(size, numel, dtype)
            for result, _ in reduced(tensors, algorithm=algorithm):
                assert torch.equal(result, sum(tensors[1:], tensors[0])), (dtype, numel)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("product", lambda stack: stack.prod(0)),
        ("maximum", lambda stack: stack.amax(0)),
        ("minimum", lambda stack: stack.amin(0)),
        ("average", lambda stack: stack.mean(0)),
    ],
)
def test_other_reductions(algorithm, operation, expected):
    tensors = tensors_of(4, 37, torch.float64)
    for result, _ in reduced(tensors, operation, algorithm):
        assert torch.equal(result, expected(torch.stack(tensors)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_ranks_have_the_same_bits(algorithm, size, dtype):
    generator = torch.Generator().manual_seed(size)
    tensors = [torch.randn(1001, generator=generator).to(dtype) for _ in range(size)]
    results = [result for result, _ in reduced(tensors, algorithm=algorithm)]
    for result in results[1:]:
        assert torch.equal(result.view(torch.uint8), results[0].view(torch.uint8))
    exact = torch.stack(tensors).to(torch.float64).sum(0)
    rounding = size * torch.finfo(dtype).eps * torch.stack(tensors).to(torch.float64).abs().sum(0)
    assert ((results[0].to(torch.float64) - exact).abs() <= rounding).all()


def chunk_bytes(size, numel):
    """Return the bytes of each chunk when a float64 tensor is cut for `size` ranks."""
    return [8 * (numel // size + (chunk < numel % size)) for chunk in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [0, 3, 5, 1000, 1003])
def test_a_ring_in_chunks_sends_all_chunks_but_one_twice(size, numel):
    chunks = chunk_bytes(size, numel)
    for rank, (_, traffic) in enumerate(reduced(tensors_of(size, numel, torch.float64))):
        # Not sent on: first what it completes itself, then what its right neighbour has completed.
        spared = chunks[(rank + 1) % size] + chunks[(rank + 2) % size]
        assert traffic.num_bytes == (2 * sum(chunks) - spared if size > 1 else 0)


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_of_whole_tensors_sends_one_to_every_other_rank(size):
    for _, traffic in reduced(tensors_of(size, 100, torch.float64), algorithm="ring"):
        assert traffic.num_bytes == (size - 1) * 800
        assert traffic.num_messages == size - 1


@pytest.mark.parametrize(
    ("size", "messages"), [(1, [0]), (2, [1, 1]), (3, [2, 1, 1]), (4, [2, 1, 2, 1]), (5, [3, 1, 2, 1, 1])]
)
def test_a_tree_sends_up_once_and_down_to_each_child(size, messages):
    sent = [traffic for _, traffic in reduced(tensors_of(size, 100, torch.float64), algorithm="tree")]
    assert [traffic.num_messages for traffic in sent] == messages
    assert [traffic.num_bytes for traffic in sent] == [800 * number for number in messages]


@pytest.mark.parametrize(
    ("size", "tensors_sent"),
    [
        (1, [0]),
        (2, [1, 1]),
        (3, [2, 1, 1]),  # rank 2 gives rank 0 its tensor and gets the result from it
        (4, [1.5] * 4),
        (5, [2.5, 1.5, 1.5, 1.5, 1]),
    ],
)
def test_halving_and_doubling_sends_what_its_formula_says(size, tensors_sent):
    results = reduced(tensors_of(size, 100, torch.float64), algorithm="halving_doubling")
    assert [traffic.num_bytes / 800 for _, traffic in results] == tensors_sent


def test_between_hosts_only_their_first_ranks_send():
    hosts = [[0, 1, 2], [3, 4]]
    tensors = tensors_of(5, 100, torch.float64)
    crossed = []

    def work(transport):
        begin = transport._begin

        def watched(sends, receives):
            crossed.extend(
                (transport.rank, to, tensor.nbytes)
                for tensor, to in sends
                if (transport.rank < 3) != (to < 3)
            )
            return begin(sends, receives)

        transport._begin = watched
        transport.hosts = hosts
        tensor = tensors[transport.rank].clone()
        all_reduce(transport, tensor, algorithm="hierarchical")
        return tensor, transport.traffic.num_bytes

    results = run_ranks(5, work)
    received = 2 * 800  # by rank 0 at the two levels of its host's tree
    assert hierarchical_cost(3, 2, 800).num_bytes == max(sent for _, sent in results) + received
    for result, _ in results:
        assert torch.equal(result, sum(tensors[1:], tensors[0]))
    assert {(rank, to) for rank, to, _ in crossed} == {(0, 3), (3, 0)}
    assert sum(num_bytes for rank, _, num_bytes in crossed if rank == 0) == 800  # 2 (n - 1) / n of it, n = 2


@pytest.mark.parametrize("algorithm", ["ring", "chunked_ring", "tree", "halving_doubling"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_the_cost_formula_counts_the_bytes_of_the_busiest_rank(algorithm, size):
    numel = 840 * 8  # divides by all sizes
    traffic = [traffic for _, traffic in reduced(tensors_of(size, numel, torch.float64), algorithm=algorithm)]
    cost = all_reduce_cost(algorithm, size, numel * 8)
    if algorithm == "tree":  # the root receives at each level too
        levels = (size - 1).bit_length()
        assert cost.num_bytes == traffic[0].num_bytes + levels * numel * 8
        assert cost.num_rounds == 2 * levels
    else:
        assert cost.num_bytes == max(one.num_bytes for one in traffic) + extra_received(
            algorithm, size, numel
        )


def extra_received(algorithm, size, numel):
    """Return what the busiest rank of halving and doubling takes in beside what it sends."""
    folded = algorithm == "halving_doubling" and size & (size - 1)
    return numel * 8 if folded else 0


def test_a_tensor_that_is_not_contiguous_is_reduced_in_place():
    def work(transport):
        tensor = torch.arange(12.0).view(3, 4).t()
        all_reduce(transport, tensor)
        return tensor

    for result in run_ranks(3, work):
        assert torch.equal(result, 3 * torch.arange(12.0).view(3, 4).t())


def test_wrong_names_and_formats_are_refused_with_what_there_is():
    def refused(*args):
        with pytest.raises(InputError) as caught:
            run_ranks(2, lambda transport: all_reduce(transport, *args))
        return f"{caught.value} {caught.value.hint}"

    assert "unknown all-reduce algorithm 'star'" in refused(torch.ones(2), "sum", "star")
    assert "chunked_ring" in refused(torch.ones(2), "sum", "star")
    assert "ThreadTransport has no all-reduce of its own" in refused(torch.ones(2), "sum", "backend")
    assert "no reduction 'xor'" in refused(torch.ones(2), "xor")
    assert "torch.int64 has no average" in refused(torch.ones(2, dtype=torch.int64), "average")
