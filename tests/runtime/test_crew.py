"""Warm processes that take seats together: results by rank, and a sentence for one that falls."""

import pytest

from shoal.config.sections import Runtime
from shoal.errors import ShoalError
from shoal.runtime.crew import Crew
from tests.parity import sabotage

PRELOAD = ("shoal.runtime.crew",)


@pytest.fixture(scope="module")
def crew():
    with Crew(3, Runtime(device="cpu", threads=1), PRELOAD) as crew:
        yield crew


def test_each_call_takes_as_many_seats_as_it_needs(crew):
    words = []
    assert crew.run("one", words.append, 1, sabotage.add_up, 10) == [10]
    assert crew.run("three", words.append, 3, sabotage.add_up, 10) == [33, 33, 33]
    assert words == ["adding", "adding"]


@pytest.mark.parametrize(
    ("deed", "sentence"),
    [
        (sabotage.fail, r"case: after a rehearsal, rank 1 failed: ValueError: a broken rank"),
        (sabotage.die, r"case: after a rehearsal, rank 1 was killed by signal 9 \(SIGKILL\)"),
        (sabotage.hang, r"case: rank 1 said nothing for 4 s since a rehearsal"),
    ],
)
def test_a_fallen_rank_is_named(deed, sentence):
    runtime = Runtime(device="cpu", threads=1, timeout_s=4)
    with Crew(2, runtime, PRELOAD) as crew, pytest.raises(ShoalError, match=sentence) as caught:
        crew.run("case", lambda word: None, 2, deed)
    assert caught.value.exit_code == 1
