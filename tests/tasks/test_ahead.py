"""What the next step needs is made while this one runs; errors belong to their step."""

import threading
import time
import traceback

import pytest

from shoal.tasks.feed import Ahead


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_the_next_step_is_made_before_it_is_asked_for():
    made = []
    ahead = Ahead(lambda step: made.append(step) or step * 10)
    assert ahead.get(3) == 30
    until = time.monotonic() + 5
    while made != [3, 4]:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert [ahead.get(4), ahead.get(5)] == [40, 50]
    ahead.close()
    assert sorted(set(made)) == made


def test_a_slow_making_is_hidden_behind_the_step():
    ahead = Ahead(lambda step: time.sleep(0.05) or step)
    waited = []
    for step in range(1, 6):
        start = time.perf_counter()
        ahead.get(step)
        waited.append(time.perf_counter() - start)
        time.sleep(0.1)  # the step
    ahead.close()
    assert waited[0] >= 0.05
    assert sorted(waited[1:])[1] < 0.025


def test_any_step_may_be_asked_for():
    ahead = Ahead(lambda step: step)
    assert [ahead.get(step) for step in (5, 6, 2, 2, 9)] == [5, 6, 2, 2, 9]
    ahead.close()


def make_but_for_seven(step):
    if step == 7:
        raise ValueError("step seven is unwell")
    return step


def test_an_error_is_raised_in_its_own_step_with_its_own_traceback():
    ahead = Ahead(make_but_for_seven)
    assert ahead.get(6) == 6
    with pytest.raises(ValueError, match="step seven is unwell") as caught:
        ahead.get(7)
    assert "make_but_for_seven" in "".join(traceback.format_exception(caught.value))
    assert ahead.get(8) == 8
    ahead.close()


def test_closing_leaves_no_thread():
    before = len(threads())
    ahead = Ahead(lambda step: time.sleep(0.05) or step)
    ahead.get(1)
    assert len(threads()) == before + 1
    ahead.close()
    assert len(threads()) == before


def test_the_thread_is_prepared_before_it_makes_anything():
    seen = []
    ahead = Ahead(
        lambda step: seen[0] == threading.current_thread().name,
        lambda: seen.append(threading.current_thread().name),
    )
    assert ahead.get(1)
    ahead.close()
