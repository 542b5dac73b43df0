"""Exchanges over many steps: error feedback, warm-up, steps that are left out, and loss scales."""

import threading

import pytest
import torch

from shoal.comm.thread_transport import run_ranks
from shoal.strategies.codecs import OneBit
from shoal.strategies.compression import CompressedExchange, _Thread
from shoal.strategies.methods import TwoPhase
from tests.strategies.gradients import FEEDBACK, METHODS, NUMEL, bucket_of, gradients

STEPS, SIZE = 6, 3


def run(method, script, warmup_steps=0, dtype=torch.float64):
    """Exchange gradients; `script` yields (step, scale, factor of the gradients, applied).

    Returns for each rank the sums and the residual at the end, and the bytes sent.
    """

    def work(transport):
        views = bucket_of(torch.zeros(NUMEL, dtype=dtype)).views
        exchange = CompressedExchange(method, transport, METHODS[method](views), views, warmup_steps)
        sums = []
        for step, scale, factor, applied in script:
            bucket = bucket_of(gradients(SIZE, dtype=dtype, seed=step)[transport.rank] * factor)
            exchange.begin(step, scale)
            exchange.start(bucket).wait()
            exchange.end(applied=applied)
            sums.append(bucket.flat / factor)
        residual = torch.cat([tensor.flatten() for tensor in exchange.state().values()])
        return sums, residual.clone(), transport.traffic.num_bytes

    return run_ranks(SIZE, work)


def plain(steps=STEPS):
    return [(step, 1.0, 1.0, True) for step in range(1, steps + 1)]


@pytest.mark.parametrize("method", FEEDBACK)
def test_what_was_put_in_comes_out_or_is_still_held_back(method):
    """Over all steps and ranks, exactly; for PowerSGD but for the rounding of its products."""
    ranks = run(method, plain())
    put_in = sum(sum(gradients(SIZE, seed=step)) for step in range(1, STEPS + 1))
    balance = sum(ranks[0][0]) + sum(residual for _, residual, _ in ranks) - put_in
    assert balance.abs().max() <= (1e-12 if method == "powersgd" else 0)
    assert sum(residual.abs().sum() for _, residual, _ in ranks) > 1


@pytest.mark.parametrize("method", FEEDBACK)
def test_steps_of_warm_up_are_exact_and_hold_nothing_back(method):
    sums, residual, _ = run(method, plain(2), warmup_steps=2)[0]
    for step, total in enumerate(sums, start=1):
        assert torch.equal(total, sum(gradients(SIZE, seed=step)))
    assert not residual.any()
    later = run(method, plain(3), warmup_steps=2)[0]
    assert later[1].any()


def test_a_share_of_what_is_held_back_joins_the_next_gradient_and_the_rest_stays():
    codec = OneBit(64, feedback=0.25)
    flats = gradients(2, 128)

    def work(transport):
        views = bucket_of(torch.zeros(128, dtype=torch.float64), {"a": (128,)}).views
        exchange = CompressedExchange("onebit", transport, TwoPhase(codec), views)
        seen = []
        for step, flat in enumerate((flats[transport.rank], torch.zeros(128, dtype=torch.float64)), 1):
            bucket = bucket_of(flat, {"a": (128,)})
            exchange.begin(step, 1.0)
            exchange.start(bucket).wait()
            exchange.end(applied=True)
            seen += [bucket.flat, exchange.state()["residual.a"].clone()]
        return seen

    def decoded(flat):
        codec.decode(codec.encode(flat), into := torch.empty_like(flat))
        return into

    ranks = run_ranks(2, work)
    held = [flat - decoded(flat) for flat in flats]
    for rank, (first, held_then, second, held_now) in enumerate(ranks):
        assert torch.equal(first, sum(map(decoded, flats)))
        assert torch.equal(held_then, held[rank])
        assert torch.equal(second, sum(decoded(0.25 * one) for one in held))
        assert torch.equal(held_now, held[rank] - decoded(0.25 * held[rank]))


@pytest.mark.parametrize("factor", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("method", FEEDBACK)
def test_a_step_that_is_left_out_leaves_no_trace(method, factor):
    """Neither an overflow nor a step that the guard did not like, nor their bytes in what is held back."""
    before, after = plain()[:3], plain()[3:]
    with_skip = run(method, [*before, (9, 1.0, factor, False), *after])
    without = run(method, plain())
    for left, right in zip(with_skip, without, strict=True):
        assert torch.equal(left[1], right[1])
        assert all(torch.equal(a, b) for a, b in zip(left[0][4:], right[0][3:], strict=True))


@pytest.mark.parametrize("method", FEEDBACK)
def test_what_is_held_back_does_not_depend_on_the_loss_scale(method):
    """A scale that moves between steps, as fp16's does."""
    scales = [2.0 ** (10 - step) for step in range(STEPS)]
    moving = [(step, scale, scale, True) for (step, *_), scale in zip(plain(), scales, strict=True)]
    for scaled, fixed in zip(run(method, moving), run(method, plain()), strict=True):
        for a, b in zip((*scaled[0], scaled[1]), (*fixed[0], fixed[1]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_buckets_keep_their_order_and_errors_reach_who_waits():
    def work(transport):
        views = bucket_of(torch.zeros(NUMEL)).views
        exchange = CompressedExchange("onebit", transport, METHODS["onebit"](views), views)
        buckets = [bucket_of(torch.full((NUMEL,), float(number))) for number in range(5)]
        handles = [exchange.start(bucket) for bucket in buckets]
        for handle in reversed(handles):
            handle.wait()
        for number, bucket in enumerate(buckets):
            assert (bucket.flat == 2 * number).all()
        exchange.begin(1, 1.0)
        with pytest.raises(KeyError, match=r"residual\.stranger"):
            exchange.start(bucket_of(torch.ones(4), {"stranger": (4,)})).wait()

    run_ranks(2, work)


def test_buckets_are_exchanged_one_after_the_other():
    """All ranks take them in the same order: two at a time would meet each other's messages."""
    thread, may_end, done = _Thread(torch.device("cpu")), threading.Event(), []

    def first():
        assert may_end.wait(60)
        done.append(1)

    handles = [thread.start(first), thread.start(lambda: done.append(2))]
    threading.Timer(0.3, may_end.set).start()
    for handle in handles:
        handle.wait()
    assert done == [1, 2]
