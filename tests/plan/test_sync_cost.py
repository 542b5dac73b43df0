"""Cost of strategies by formula: bytes against what the real methods send, time and break-even by hand."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

from shoal.comm.silent_transport import SilentTransport
from shoal.comm.thread_transport import run_ranks
from shoal.config.sections import Sync
from shoal.gradsync.exchange import Bucket
from shoal.plan.sync_cost import ComputeTime, Demand, Line, Replicas, break_even, demand, seconds, step_lines
from shoal.strategies import owners
from shoal.strategies.async_sgd import StalenessBound
from shoal.strategies.codecs import Int8, Plain
from shoal.strategies.compression import CompressedExchange
from shoal.strategies.exchange import method_of
from shoal.strategies.outer import average, pack
from tests.strategies.asynchronous import make, train

SHAPES = {"a": (64, 48), "b": (64,), "c": (48, 64), "d": (64, 33), "e": (64, 33), "f": (64,)}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())


def count_on(wires, transport):
    """Count in `wires` what each pair of ranks sends."""
    begin = transport._begin

    def counting(sends, receives):
        for tensor, to in sends:
            wires[transport.rank, to] = wires.get((transport.rank, to), 0) + tensor.nbytes
        return begin(sends, receives)

    transport._begin = counting


def traffic(size, act, hosts=0):
    """Return the bytes of the rank that sends most, and of the host that sends most to others."""
    wires = {}
    here = size // (hosts or size)

    def work(transport):
        count_on(wires, transport)
        transport.hosts = [list(range(at, at + here)) for at in range(0, size, here)]
        act(transport)

    run_ranks(size, work)
    by_rank, by_host = Counter(), Counter()
    for (source, to), count in wires.items():
        by_rank[source] += count
        if source // here != to // here:
            by_host[source // here] += count
    return max(by_rank.values()), max(by_host.values())


def exchanging(sync):
    def act(transport):
        weights = {name: torch.randn(*shape) for name, shape in SHAPES.items()}
        flat = torch.randn(NUMEL)
        parts = flat.split([tensor.numel() for tensor in weights.values()])
        views = {name: part.view(SHAPES[name]) for name, part in zip(weights, parts, strict=True)}
        exchange = CompressedExchange(
            sync.strategy, transport, method_of(sync, weights, torch.float32), weights, sync.warmup_steps
        )
        exchange.begin(1, 1.0)
        exchange.start(Bucket(0, flat, views)).wait()

    return act


def owning(strategy):
    def act(transport):
        weights = {name: nn.Parameter(torch.randn(*shape)) for name, shape in SHAPES.items()}
        owned = owners.Owners(weights, strategy, transport, torch.float32)
        owned.run()
        owned.after_step(1)

    return act


def working(transport, steps):
    weights = {name: nn.Parameter(torch.randn(*shape)) for name, shape in SHAPES.items()}
    _, _, sync = make(transport, StalenessBound(1, 0, steps), named=weights)
    sync.start(0)
    train(weights, sync, steps)
    sync.close()


EXCHANGES = [
    Sync(algorithm="chunked_ring"),
    Sync(algorithm="ring"),
    Sync(algorithm="tree"),
    Sync(algorithm="halving_doubling"),
    Sync(algorithm="hierarchical"),
    Sync(strategy="bf16"),
    Sync(strategy="int8", block=32),
    Sync(strategy="onebit", block=32),
    Sync(strategy="topk", density=0.05),
    Sync(strategy="powersgd", rank=3),
]


@pytest.mark.parametrize("sync", EXCHANGES, ids=lambda sync: f"{sync.strategy}-{sync.algorithm}")
@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (3, 3), (4, 4), (4, 2), (8, 4)])
def test_exchanges_send_what_their_formula_says(sync, size, hosts):
    by_rank, by_link = traffic(size, exchanging(sync), hosts)
    said = demand(sync, SHAPES, Replicas(size, hosts))
    rounding = 0.02  # chunks and shares are whole numbers of values or blocks
    assert said.sent_bytes == pytest.approx(by_rank, rel=rounding)
    if sync.algorithm == "tree" or (sync.algorithm == "halving_doubling" and hosts == 3):
        assert by_link < said.link_bytes <= 2 * by_link  # some rank takes tensors in before it sends as many
    else:
        assert said.link_bytes == pytest.approx(by_link, rel=rounding)


@pytest.mark.parametrize("strategy", ["central_serial", "central_parallel", "device_sharded", "tree_update"])
@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 4), (4, 2)])
def test_owners_send_what_their_formula_says(strategy, size, hosts):
    by_rank, by_link = traffic(size, owning(strategy), hosts)
    said = demand(Sync(strategy=strategy), SHAPES, Replicas(size, hosts))
    if strategy == "device_sharded":  # shares are whole weights: up to twice the mean here
        assert said.sent_bytes == pytest.approx(by_rank, rel=0.3)
        assert by_link <= said.link_bytes * 1.3
    else:  # gradients come in as weights go out
        assert said.sent_bytes == pytest.approx(by_rank, rel=0.01)
        assert said.link_bytes == pytest.approx(2 * by_link, rel=0.01)


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 4), (4, 2)])
def test_asynchronous_workers_send_what_their_formula_says(size, hosts):
    one, three = (traffic(size, lambda t, steps=steps: working(t, steps), hosts) for steps in (1, 3))
    said = demand(Sync(strategy="async_sgd"), SHAPES, Replicas(size, hosts))
    assert said.sent_bytes == pytest.approx((three[0] - one[0]) / 2, rel=0.02)
    assert said.link_bytes == pytest.approx((three[1] - one[1]) / 2, rel=0.02)


def test_what_asynchronous_workers_send_hides_behind_the_next_step_unless_they_are_in_step():
    compute_time, per_byte_s = ComputeTime(1.0, 0.5), 1e-6
    for staleness, num_bytes, step_s in ((4, 4e5, 1.0), (4, 3e6, 3.0), (0, 4e5, 1.4)):
        shapes = {"a": (round(num_bytes / 8),), "b": (round(num_bytes / 8),)}
        asked = demand(Sync(strategy="async_sgd", staleness=staleness), shapes, Replicas(2, 2))
        assert asked.link_bytes == num_bytes
        assert seconds(step_lines(asked, compute_time, 0.0, 0.0), per_byte_s) == pytest.approx(step_s)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 4), (4, 2)])
def test_outer_strategies_send_what_their_formula_says(int8, size, hosts):
    sync = Sync(strategy="diloco", every=50, int8=int8, block=64)
    codec = Int8(sync.block) if int8 else Plain(torch.float32)

    def act(transport):
        average(transport, pack([torch.randn(*shape) for shape in SHAPES.values()], codec), codec)

    by_rank, by_link = traffic(size, act, hosts)
    said = demand(sync, SHAPES, Replicas(size, hosts))
    assert said.sent_bytes * sync.every == pytest.approx(by_rank, rel=0.02)
    assert said.link_bytes * sync.every == pytest.approx(by_link, rel=0.02)


def test_a_rank_of_a_replica_of_four_sends_a_quarter_and_the_link_carries_all():
    whole, parts = (demand(Sync(strategy="bf16"), SHAPES, Replicas(2, 2, ranks)) for ranks in (1, 4))
    assert parts.sent_bytes == whole.sent_bytes / 4
    assert parts.link_bytes == whole.link_bytes
    assert (parts.behind_backward, parts.tail) == (0, 1)


def test_the_ranks_of_a_replica_fill_fewer_buckets_with_their_parts():
    shapes = {str(n): (1 << 20, 7) for n in range(16)}  # 28 MiB each; a bucket has 25
    alone, eight = (demand(Sync(), shapes, Replicas(2, 2, ranks)).messages for ranks in (1, 8))
    assert (alone, eight) == (2 * 16, 2 * 3)


def test_gradients_in_bf16_halve_what_all_reduce_sends_and_owners_still_send_weights_whole():
    fp32, bf16 = (Replicas(4, 4, gradient_bytes=size) for size in (4, 2))
    assert demand(Sync(), SHAPES, bf16).link_bytes == demand(Sync(), SHAPES, fp32).link_bytes / 2
    central = Sync(strategy="central_serial")
    assert demand(central, SHAPES, bf16).link_bytes == demand(central, SHAPES, fp32).link_bytes * 0.75


def test_one_replica_asks_for_nothing():
    assert demand(Sync(), SHAPES, Replicas(1, 1)) == Demand(0, 0, 0)


def test_all_but_the_last_bucket_hides_behind_the_backward_pass():
    """Three buckets, of which the backward pass fills the last layer's, of 1 MB, first."""
    shapes = {"first": (26 << 18,), "middle": (25 << 18,), "last": (1 << 18,)}
    said = demand(Sync(), shapes, Replicas(2, 2))
    assert said.behind_backward == pytest.approx(51 / 52)
    assert said.tail == pytest.approx(26 / 52)
    assert said.messages == 2 * 3
    compute_time = ComputeTime(step_s=3.0, backward_s=2.0)
    lines = step_lines(said, compute_time, work_s=0.5, latency_s=0.0)
    num_bytes = 52 << 20
    assert seconds(lines, 0.0) == 3.5
    assert seconds(lines, 0.1 / num_bytes) == pytest.approx(3.5 + 0.05)  # what hides does
    assert seconds(lines, 10 / num_bytes) == pytest.approx(3.5 + 10 - 2.0 * 51 / 52)  # backward is full


def test_streaming_hides_behind_the_steps_of_its_overlap():
    sync = Sync(strategy="streaming_diloco", every=20, fragments=4, overlap=3)
    said, compute_time = demand(sync, SHAPES, Replicas(2, 2)), ComputeTime(1.0, 0.5)
    lines = step_lines(said, compute_time, 0.0, 0.0)
    per_fragment = 4 * NUMEL / 4
    assert seconds(lines, 3.0 / per_fragment) == pytest.approx(1.0)
    assert seconds(lines, 8.0 / per_fragment) == pytest.approx(1.0 + 4 * (8.0 - 3.0) / 20)
    at_once = step_lines(
        demand(sync.model_copy(update={"overlap": 0}), SHAPES, Replicas(2, 2)), compute_time, 0.0, 0.0
    )
    assert seconds(at_once, 8.0 / per_fragment) == pytest.approx(1.0 + 4 * 8.0 / 20)


def test_latency_counts_for_messages_that_follow_each_other():
    serial, parallel = (
        step_lines(demand(Sync(strategy=name), SHAPES, Replicas(8, 8)), ComputeTime(1.0, 0.5), 0.0, 1e-3)
        for name in ("central_serial", "central_parallel")
    )
    assert seconds(serial, 0.0) == pytest.approx(1.0 + 14e-3)
    assert seconds(parallel, 0.0) == pytest.approx(1.0 + 2e-3)


def test_below_the_break_even_a_strategy_is_faster_and_above_it_slower():
    lean, plain = (Line(2.0, 100.0), Line(2.5, 10.0)), (Line(1.0, 1000.0), Line(1.2, 600.0))
    bandwidth = break_even(lean, plain)
    assert seconds(lean, 1 / bandwidth) == pytest.approx(seconds(plain, 1 / bandwidth))
    assert seconds(lean, 1 / (0.99 * bandwidth)) < seconds(plain, 1 / (0.99 * bandwidth))
    assert seconds(lean, 1 / (1.01 * bandwidth)) > seconds(plain, 1 / (1.01 * bandwidth))


@pytest.mark.parametrize(
    ("ours", "bandwidth"),
    [
        ((Line(1.0, 100.0),), math.inf),  # the same
        ((Line(0.9, 90.0),), math.inf),
        ((Line(1.1, 100.0),), 0.0),  # as many bytes, more work
        ((Line(0.5, 101.0),), 0.0),  # faster on fast links only
        ((Line(1.5, 50.0),), 100.0),
    ],
)
def test_always_and_never_are_answers(ours, bandwidth):
    assert break_even(ours, (Line(1.0, 100.0),)) == bandwidth


def test_a_silent_rank_receives_zeros_and_counts_what_it_would_send():
    transport = SilentTransport(1, 4)
    arriving = torch.ones(5)
    transport.exchange(torch.ones(3), 2, arriving, 0)
    assert arriving.tolist() == [0] * 5
    assert (transport.traffic.num_bytes, transport.traffic.num_messages) == (12, 1)
    silent = exchanging(Sync(strategy="onebit"))
    transport = SilentTransport(0, 4)
    silent(transport)
    real = run_ranks(4, lambda rank: (silent(rank), rank.traffic.num_bytes)[1])
    assert transport.traffic.num_bytes == real[0]
