"""Warm processes that run as ranks: results by rank, and a sentence for one that fails."""

import pytest

from shoal.config.sections import Runtime
from shoal.errors import ShoalError
from shoal.worker_pool import WorkerPool
from tests.parity import sabotage

PRELOAD = ("shoal.worker_pool",)


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(Runtime(device="cpu", threads=1), PRELOAD, 3) as pool:
        yield pool


def test_each_call_takes_as_many_ranks_as_it_needs(pool):
    words = []
    assert pool.run("one", words.append, 1, sabotage.add_up, 10) == [10]
    assert pool.run("three", words.append, 3, sabotage.add_up, 10) == [33, 33, 33]
    assert words == ["adding", "adding"]


@pytest.mark.parametrize(
    ("deed", "sentence"),
    [
        (sabotage.fail, r"case: after a rehearsal, rank 1 failed: ValueError: a broken rank"),
        (sabotage.die, r"case: after a rehearsal, rank 1 was killed by signal 9 \(SIGKILL\)"),
        (sabotage.hang, r"case: rank 1 said nothing for 4 s since a rehearsal"),
    ],
)
def test_a_failed_rank_is_named(deed, sentence):
    runtime = Runtime(device="cpu", threads=1, timeout_s=4)
    with WorkerPool(runtime, PRELOAD, 2) as pool, pytest.raises(ShoalError, match=sentence) as caught:
        pool.run("case", lambda word: None, 2, deed)
    assert caught.value.exit_code == 1
