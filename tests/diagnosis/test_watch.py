"""When silence counts as a hang, by a clock of our own."""

import pytest

from shoal.diagnosis import watch as module
from shoal.diagnosis.watch import Watch


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "_START_S", 30.0)  # the ranks of these tests never begin
    return clock


def seconds_until_trouble(watch, clock, most=200):
    """Look once a second; return when the watch finds trouble."""
    for second in range(most):
        if watch.troubled():
            return second
        clock.now += 1.0
    return most


def test_ranks_that_say_nothing_for_the_limit_hang(tmp_path, clock):
    assert 30 <= seconds_until_trouble(Watch(tmp_path, [0, 1], 30.0), clock) <= 33


@pytest.mark.parametrize("asleep_s", [100.0, 5.0])
def test_time_in_which_nobody_looked_does_not_count(tmp_path, clock, asleep_s):
    watch = Watch(tmp_path, [0, 1], 30.0)
    assert seconds_until_trouble(watch, clock, most=20) == 20
    clock.now += asleep_s  # a laptop that was closed, a launcher that was stopped
    assert 10 <= seconds_until_trouble(watch, clock) <= 13
