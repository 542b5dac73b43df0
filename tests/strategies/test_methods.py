"""Ways to add gradients up: what they send, what they lose, and that nothing is lost for good."""

import pytest
import torch

from shoal.comm.thread_transport import run_ranks
from shoal.config.sections import Sync
from shoal.strategies.codecs import Bf16, Int8, OneBit
from shoal.strategies.exchange import method_of
from shoal.strategies.methods import PowerSGD, TopK, TwoPhase, shares_of
from tests.strategies.gradients import BLOCK, FEEDBACK, METHODS, NUMEL, SHAPES, bucket_of, gradients


@pytest.mark.parametrize(("strategy", "reads"), [("onebit", True), ("topk", True), ("powersgd", False)])
def test_the_setting_says_how_much_of_what_is_held_back_joins_the_next_gradient(strategy, reads):
    method = method_of(Sync(strategy=strategy, feedback=0.25), {"a": torch.zeros(64, 40)}, torch.float32)
    assert method.feedback == (0.25 if reads else 1.0)


def added_up(make, flats, shapes=SHAPES):
    """Return for each rank the sum, what it has to remember, and what it has sent."""

    def work(transport):
        bucket = bucket_of(flats[transport.rank], shapes)
        lost = make(bucket.views).add_up(transport, bucket)
        return bucket.flat, lost, transport.traffic.num_bytes

    return run_ranks(len(flats), work)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_have_the_same_bits_and_nothing_is_lost(method, size):
    for dtype, rounding in ((torch.float64, 1e-14), (torch.float32, 1e-5)):
        flats = gradients(size, dtype=dtype)
        ranks = added_up(METHODS[method], flats)
        for total, _, _ in ranks[1:]:
            assert torch.equal(total, ranks[0][0])
        if method == "bf16":
            assert ranks[0][1] is None
            torch.testing.assert_close(ranks[0][0], sum(flats), rtol=1e-2, atol=2e-2)
            continue
        kept = sum(lost for _, lost, _ in ranks) if method in FEEDBACK else 0
        error = (ranks[0][0] + kept - sum(flats)).abs().max()
        assert error <= (rounding if dtype == torch.float32 or method == "powersgd" else 0)


@pytest.mark.parametrize("numel", [1, 5, 64, 65, 200])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "powersgd"])
def test_a_bucket_may_have_any_length(method, numel):
    flats = gradients(3, numel)
    ranks = added_up(METHODS[method], flats, {"a": (numel,)})
    assert all(torch.equal(total, ranks[0][0]) for total, _, _ in ranks)
    if method in FEEDBACK:
        assert torch.equal(ranks[0][0] + sum(lost for _, lost, _ in ranks), sum(flats))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("codec", [Bf16(), Int8(BLOCK), OneBit(BLOCK)], ids=lambda c: type(c).__name__)
def test_a_rank_sends_its_part_of_others_shares_and_the_sums_that_pass_it(codec, size):
    shares = [codec.num_bytes(len(share)) for share in shares_of(torch.empty(NUMEL), size, codec.block)]
    for rank, (_, _, sent) in enumerate(added_up(lambda _: TwoPhase(codec), gradients(size))):
        assert sent == 2 * sum(shares) - shares[rank] - shares[(rank + 1) % size]


def test_one_bit_takes_twenty_five_times_fewer_bytes_than_fp32():
    numel, block = 4 << 20, Sync().block
    assert OneBit(block).num_bytes(numel) == numel // 8 + numel // block * 2
    assert 4 * numel / OneBit(block).num_bytes(numel) > 25


@pytest.mark.parametrize("size", [2, 4])
def test_topk_sends_places_and_values_and_powersgd_two_thin_matrices(size):
    for _, _, sent in added_up(METHODS["topk"], gradients(size, dtype=torch.float32)):
        assert sent == (size - 1) * round(0.01 * NUMEL) * (4 + 4)
    # Rank 2: the matrices' rows, and what travels as it is; then their columns. Each in an all-reduce.
    numbers = 2 * (7 + 64) + 33 + 2 * (31 + 40)
    ranks = added_up(METHODS["powersgd"], gradients(size, dtype=torch.float32))
    assert sum(sent for _, _, sent in ranks) == 2 * (size - 1) * numbers * 4


@pytest.mark.parametrize("codec", [Bf16(), Int8(8), OneBit(8)], ids=lambda c: type(c).__name__)
def test_codecs_by_hand(codec):
    values = torch.tensor([3.0, -1, 0, 2, 0, 0, 0, -2, 0.5, 0.25])
    decoded = torch.empty_like(values)
    codec.decode(codec.encode(values), decoded)
    expected = {
        "Bf16": values,
        "Int8": torch.cat([(values[:8] * 127 / 3).round() * 3 / 127, (values[8:] * 254).round() / 254]),
        "OneBit": torch.tensor([1.0, -1, 1, 1, 1, 1, 1, -1, 0.375, 0.375]),
    }
    torch.testing.assert_close(decoded, expected[type(codec).__name__])


def test_a_block_of_zeros_stays_zero():
    for codec in (Int8(8), OneBit(8)):
        decoded = torch.ones(16)
        codec.decode(codec.encode(torch.zeros(16)), decoded)
        assert not decoded.any()


def test_all_of_the_values_are_the_sum():
    flats = gradients(3)
    total, lost, _ = added_up(lambda _: TopK(1.0), flats)[0]
    assert torch.equal(total, sum(flats))
    assert not lost.any()


def test_powersgd_is_exact_where_the_sum_has_its_rank():
    """The sum of the ranks' matrices has rank 2; their own have more."""
    generator = torch.Generator().manual_seed(1)
    left, right, noise = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((30, 2), (2, 20), (30, 20))
    )
    flats = [(left @ right / 2 + sign * noise).flatten() for sign in (1, -1)]
    ranks = added_up(lambda views: PowerSGD(2, views), flats, {"m": (30, 20)})
    torch.testing.assert_close(ranks[0][0], (left @ right).flatten(), rtol=1e-12, atol=1e-12)
    assert ranks[0][1].norm() > 1  # though each rank still holds something back
    assert (ranks[0][1] + ranks[1][1]).norm() < 1e-12


def test_powersgd_finds_the_largest_directions_from_step_to_step():
    """Of one matrix again and again, without feedback: subspace iteration."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(30, 20, generator=generator, dtype=torch.float64)
    matrix = matrix @ torch.diag(0.7 ** torch.arange(20, dtype=torch.float64))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best = matrix - u[:, :2] @ torch.diag(s[:2]) @ v[:2]

    def work(transport):
        errors, method = [], PowerSGD(2, {"m": matrix})
        for _ in range(20):
            bucket = bucket_of(matrix.flatten(), {"m": (30, 20)})
            errors.append(float(method.add_up(transport, bucket).norm()))
            method.memory.settle(applied=True)
        return errors

    (errors,) = run_ranks(1, work)
    assert errors[0] > 1.05 * best.norm()
    assert errors[-1] == pytest.approx(float(best.norm()), rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_on_one_rank_is_so_on_all(method, bad):
    flats = gradients(3, dtype=torch.float32)
    flats[1][300] = bad
    for total, _, _ in added_up(METHODS[method], flats):
        assert not total.isfinite().all()
