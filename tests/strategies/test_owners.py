"""Owners of weights, on ranks that are threads: exact sums, exact bytes, weights alike again."""

import pytest
import torch
from torch import nn

from shoal.comm.thread_transport import run_ranks
from shoal.strategies.owners import Owners, share_out
from tests.strategies.owned import SHAPES, STRATEGIES, gradient

ROOM = {"embed": 192, "up": 64, "bias": 16}
WHOLE = sum(ROOM.values())


def make(transport, strategy, dtype=torch.float64, travel=torch.float64):
    weights = {name: nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    return weights, Owners(weights, strategy, transport, travel)


def step(strategy, size, scale=1.0, **formats):
    """Return for each rank: what it owns, the sums there, all weights after an update, bytes of both ways."""

    def work(transport):
        weights, owners = make(transport, strategy, **formats)
        for name, weight in weights.items():
            weight.grad += scale * gradient(name, transport.rank, weight.dtype)
        owners.run()
        sums = {name: weight.grad.clone() for name, weight in owners.owned.items()}
        there = transport.traffic.num_bytes
        for weight in owners.owned.values():
            weight.data -= weight.grad
        owners.after_step(1)
        back = transport.traffic.num_bytes - there
        return sums, {name: weight.detach().clone() for name, weight in weights.items()}, there, back

    return run_ranks(size, work)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_weight_is_updated_once_by_the_sum_and_is_the_same_everywhere(strategy, size):
    # Whole numbers: their sums are exact in any order.
    def rounded(name, rank):
        return (8 * gradient(name, rank)).round()

    def work(transport):
        weights, owners = make(transport, strategy)
        for turn in (1, 2):  # the second sum must not begin with the first
            for name, weight in weights.items():
                weight.grad.zero_().add_(rounded(name, transport.rank))
            owners.run()
            for weight in owners.owned.values():
                weight.data -= weight.grad
            owners.after_step(turn)
        return set(owners.owned), weights

    ranks = run_ranks(size, work)
    assert sorted(name for owned, _ in ranks for name in owned) == sorted(SHAPES)
    for _, weights in ranks:
        for name, weight in weights.items():
            total = sum(rounded(name, rank) for rank in range(size))
            assert torch.equal(weight.detach(), 1 - 2 * total), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_has_one_share_and_nobody_else_has_any(strategy):
    def work(transport):
        return len(make(transport, strategy)[1].shares)

    assert run_ranks(3, work) == [3] * 3


@pytest.mark.parametrize("strategy", ["central_serial", "central_parallel"])
def test_central_sums_are_those_of_rank_order_to_the_last_bit(strategy):
    (sums, *_), *_ = step(strategy, 4)
    orders = []
    for name, total in sums.items():
        parts = [gradient(name, rank) for rank in range(4)]
        assert torch.equal(total, ((parts[0] + parts[1]) + parts[2]) + parts[3])
        orders.append(torch.equal(total, (parts[0] + parts[1]) + (parts[2] + parts[3])))
    assert not all(orders)  # the order can be seen


def test_a_tree_adds_pairs_first():
    (sums, *_), *_ = step("tree_update", 4)
    for name, total in sums.items():
        parts = [gradient(name, rank) for rank in range(4)]
        assert torch.equal(total, (parts[0] + parts[1]) + (parts[2] + parts[3]))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_are_those_of_the_formulas(strategy, size):
    weights = {name: nn.Parameter(torch.empty(shape)) for name, shape in SHAPES.items()}
    shares = [sum(ROOM[name] for name in share) for share in share_out(weights, size)]
    passed_on = {1: [0], 2: [1, 0], 3: [2, 0, 0], 4: [2, 0, 1, 0]}[size]  # by a tree: 0 to 2, then 0-1, 2-3
    for rank, (_, _, there, back) in enumerate(step(strategy, size)):
        upwards = WHOLE if rank else 0
        expected = {
            "central_serial": (upwards, 0 if rank else (size - 1) * WHOLE),
            "central_parallel": (upwards, 0 if rank else (size - 1) * WHOLE),
            "tree_update": (upwards, passed_on[rank] * WHOLE),
            "device_sharded": (WHOLE - shares[rank], WHOLE - shares[(rank + 1) % size]),
        }[strategy]
        assert (there / 8, back / 8) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_travel_in_the_format_asked_for_and_weights_as_they_are(strategy):
    formats = {"dtype": torch.float32, "travel": torch.bfloat16}
    ranks = step(strategy, 2, **formats)
    assert sum(there for _, _, there, _ in ranks) == 2 * WHOLE
    assert sum(back for *_, back in ranks) == 4 * WHOLE
    for sums, *_ in ranks:
        for name, total in sums.items():
            exact = gradient(name, 0, torch.float32) + gradient(name, 1, torch.float32)
            assert total.dtype == torch.float32
            torch.testing.assert_close(total, exact, rtol=2e-2, atol=2e-2)
            assert not torch.equal(total, exact)


def test_shares_are_even_as_whole_weights_allow():
    sizes = [50, 40, 30, 30, 20, 10]
    weights = {f"w{number}": nn.Parameter(torch.empty(size)) for number, size in enumerate(sizes)}
    shares = share_out(weights, 3)
    assert [sum(w.numel() for w in share.values()) for share in shares] == [60, 60, 60]
    assert share_out(weights, 8)[6:] == [{}, {}]


def test_weights_begin_where_kernels_like_it():
    def work(transport):
        weights, _ = make(transport, "tree_update", dtype=torch.float32)
        return [weight.data_ptr() % 64 for weight in weights.values()]

    ((first, *rest),) = run_ranks(1, work)
    assert rest == [first] * len(rest)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "device_sharded"])
def test_buckets_cut_what_travels_not_what_arrives(monkeypatch, strategy):
    whole = step(strategy, 3)
    monkeypatch.setattr("shoal.strategies.owners.BUCKET_BYTES", 100 * 8)
    for (_, weights, *num_bytes), (_, expected, *expected_bytes) in zip(
        step(strategy, 3), whole, strict=True
    ):
        assert num_bytes == expected_bytes
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_the_number_of_threads_is_set_back():
    before = torch.get_num_threads()

    def work(transport):
        torch.set_num_threads(3)
        _, owners = make(transport, "central_parallel")
        owners.run()
        return torch.get_num_threads()

    try:
        assert run_ranks(2, work)[0] == 3  # the number is that of the process: rank 1 may see another
    finally:
        torch.set_num_threads(before)
