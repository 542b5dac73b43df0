"""Which windows a step holds: each once an epoch, the same for any number of ranks, no end to the stream."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.dataset import TokenSplit
from shoal.data.loader import Loader, Windows, fixed_sample
from shoal.data.permutation import permute
from shoal.errors import DataError, ShoalError
from shoal.tasks.feed import EvalSet


def split(num_tokens, first=0):
    return TokenSplit("train", np.arange(first, first + num_tokens), 1, Path("train.bin"), 10**6)


def loader(windows, batch=4, rank=0, world_size=1, seed=1, weights=()):
    return Loader(
        windows, weights=weights, global_batch_size=batch, seed=seed, rank=rank, world_size=world_size
    )


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_the_permutation_is_a_bijection(size, seed):
    assert sorted(permute(np.arange(size), size, seed)) == list(range(size))


def test_the_permutation_depends_on_its_key():
    first, second = (permute(np.arange(1000), 1000, "train", key) for key in (1, 2))
    assert (first == second).mean() < 0.02
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.1


@pytest.mark.parametrize(("world_size", "replica_groups"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_a_steps_samples_are_what_the_ranks_of_a_world_train_on(world_size, replica_groups):
    windows = Windows([split(203)], seq_len=6)
    ranks = [
        Loader(
            windows,
            weights=(),
            global_batch_size=8,
            seed=1,
            rank=rank,
            world_size=world_size,
            replica_groups=replica_groups,
        )
        for rank in range(world_size)
    ]
    for step in (1, 5):
        for world in np.array_split(ranks, replica_groups):
            trained_on = np.concatenate([one.batch(step).samples for one in world]).tolist()
            assert [one.step_samples(step).tolist() for one in world] == [trained_on] * len(world)


@pytest.mark.parametrize("num_tokens", [41, 44, 45, 101])
def test_each_full_window_is_read_once_an_epoch(num_tokens):
    windows = Windows([split(num_tokens)], seq_len=4)
    assert windows.total == (num_tokens - 1) // 4
    data = loader(windows, batch=1)
    for epoch in range(3):
        steps = range(epoch * windows.total + 1, (epoch + 1) * windows.total + 1)
        starts = sorted(int(data.batch(step).data[0, 0]) for step in steps)
        assert starts == [4 * window for window in range(windows.total)]


def test_epochs_have_different_orders():
    windows = Windows([split(401)], seq_len=4)
    data = loader(windows, batch=100)
    assert data.batch(1).data.tolist() != data.batch(2).data.tolist()
    assert sorted(data.batch(1).data[:, 0]) == sorted(data.batch(2).data[:, 0])


def test_a_window_ends_with_the_first_token_of_the_next():
    tokens = Windows([split(100)], seq_len=9).read(np.array([0, 1, 10]))
    assert tokens[:, [0, -1]].tolist() == [[0, 9], [9, 18], [90, 99]]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_union_over_ranks_does_not_depend_on_their_number(world_size):
    windows = Windows([split(203), split(57, first=1000)], seq_len=6)
    for step in (1, 7, 100):
        parts = [loader(windows, 8, rank, world_size).batch(step) for rank in range(world_size)]
        whole = loader(windows, 8).batch(step)
        assert np.concatenate([part.data for part in parts]).tolist() == whole.data.tolist()
        assert np.concatenate([part.samples for part in parts]).tolist() == whole.samples.tolist()
        assert {part.global_targets for part in parts} == {48}


def test_ten_small_documents_last_for_a_thousand_steps(caplog):
    windows = Windows([split(10 * 30)], seq_len=16)
    data = loader(windows, batch=7)
    seen = np.zeros(windows.total, dtype=int)
    samples = np.concatenate([data.batch(step).samples for step in range(1, 1001)])
    np.add.at(seen, data.index(samples), 1)
    assert seen.sum() == 7_000
    assert seen.max() - seen.min() <= 1


def test_an_epochs_beginning_is_logged(caplog):
    windows = Windows([split(41)], seq_len=4)
    data = loader(windows, batch=4)
    with caplog.at_level("INFO", logger="shoal"):
        for step in range(1, 7):
            data.announce_epoch(step)
    assert [record.message for record in caplog.records] == [
        "epoch 2 begins in step 3",
        "epoch 3 begins in step 6",
    ]


def test_weights_are_honoured_in_every_block_and_each_dataset_keeps_its_epochs():
    windows = Windows([split(4001), split(41, first=10_000)], seq_len=4)
    data = loader(windows, batch=10_000, weights=(3.0, 1.0))
    for step in (1, 2):
        starts = data.batch(step).data[:, 0]
        small = starts[starts >= 10_000]
        assert len(small) == 2500
        assert set(np.unique(small, return_counts=True)[1]) == {250}
        assert np.ptp(np.unique(starts[starts < 10_000], return_counts=True)[1]) <= 1


def test_each_block_of_a_mix_has_an_order_of_its_own():
    windows = Windows([split(4001), split(4001, first=10_000)], seq_len=4)
    data = loader(windows, weights=(3.0, 1.0))
    places = np.arange(30_000)
    owner = data.index(places) >= 1000
    blocks = owner.reshape(3, 10_000)
    assert blocks.sum(axis=1).tolist() == [2500] * 3
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (blocks[one] == blocks[other]).mean() == pytest.approx(0.625, abs=0.02)  # as by chance
        for size in (100, 1000):  # nor is one the other, moved
            assert not np.array_equal(blocks[one][size:], blocks[other][:-size])
    parts = [data.index(part) for part in np.array_split(places, 7)]  # which straddle blocks
    assert np.concatenate(parts).tolist() == data.index(places).tolist()


def test_another_seed_gives_another_order():
    windows = Windows([split(4001)], seq_len=4)
    assert loader(windows, seed=1).batch(1).data.tolist() != loader(windows, seed=2).batch(1).data.tolist()


def test_too_few_tokens_for_one_window_are_refused():
    with pytest.raises(DataError, match=r"holds 10 tokens, fewer than one window of train.seq_len \+ 1 = 17"):
        loader(Windows([split(10)], seq_len=16))


def test_a_mixed_dataset_without_a_window_is_refused():
    windows = Windows([split(100), split(3)], seq_len=4)
    with pytest.raises(DataError, match="dataset 2 of 2 holds no full window of 5 tokens"):
        loader(windows, weights=(1.0, 1.0))


def test_a_vanishing_weight_is_refused():
    windows = Windows([split(100), split(100)], seq_len=4)
    with pytest.raises(ShoalError, match="the smallest is below 1/10000"):
        loader(windows, weights=(1.0, 1e-9))


def test_the_evaluation_sample_is_fixed_and_without_repeats():
    windows = Windows([split(401)], seq_len=4)
    assert len(set(fixed_sample(windows, 30))) == 30
    assert fixed_sample(windows, 30).tolist() == fixed_sample(windows, 30).tolist()
    assert sorted(fixed_sample(windows, 1000)) == list(range(100))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 15, 16, 17, 64, 65, 256, 257, 1_024, 1_025, 4_097])
def test_a_permutation_moves_every_place(size):
    """Around powers of 4, too, where the network's domain grows."""
    drawn = np.array([permute(np.arange(size), size, seed) for seed in range(24)])
    assert np.array_equal(np.sort(drawn), np.tile(np.arange(size), (24, 1)))
    assert all(len(set(places)) > 1 for places in drawn[:, [0, size // 2, size - 1]].T)


def test_the_evaluation_sample_is_that_of_every_release_and_comes_from_everywhere():
    """Losses can be compared with earlier ones only while these stay; `fixed_sample` has no other input."""
    windows = Windows([split(401), split(401, first=1000)], seq_len=4)
    found = fixed_sample(windows, 12).tolist()
    assert found == [189, 84, 166, 132, 45, 14, 171, 22, 157, 17, 187, 23]
    assert fixed_sample(windows, 5).tolist() == found[:5]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 16])
def test_an_evaluation_deals_each_sample_of_its_set_to_one_rank(world_size):
    windows = Windows([split(401)], seq_len=4)
    subset = EvalSet(windows, 13, 2)
    ranks = [list(subset.batches(rank, world_size)) for rank in range(world_size)]
    assert len({len(rounds) for rounds in ranks}) == 1  # collectives line up
    dealt = [data[:, 0] for rounds in ranks for data, _, valid in rounds if valid]
    assert sorted(np.concatenate(dealt) // 4) == sorted(fixed_sample(windows, 13))
    assert all(len(data) == count <= 2 for rounds in ranks for data, count, _ in rounds)
