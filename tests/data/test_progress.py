from __future__ import annotations

import io

import pytest
from rich.console import Console

from shoal.data.prepare import progress
from shoal.data.prepare.progress import RangeProgress, duration


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that a test sets by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_speed_and_time_left_count_only_what_this_run_did(clock):
    console = Console(file=io.StringIO(), width=100)
    with RangeProgress(console, "tokenise", total_bytes=100_000_000, done_bytes=50_000_000) as shown:
        assert shown.speed() == "starting"
        clock[0] = 10.0
        shown.show(60_000_000)
        assert shown.speed() == "1.0 MB/s, 40 s left"
    assert console.file.getvalue() == "tokenise  60%  1.0 MB/s, 40 s left\n"


def test_a_file_that_is_no_terminal_gets_few_plain_lines(clock):
    console = Console(file=io.StringIO(), width=100)
    with RangeProgress(console, "tokenise", 1000, 0) as shown:
        for step in range(1, 101):
            clock[0] = step / 10
            shown.show(step * 10)
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 3
    assert lines[-1].startswith("tokenise 100%")
    assert "\x1b" not in console.file.getvalue()


def test_a_range_that_starts_again_does_not_turn_the_bar_back(clock):
    with RangeProgress(Console(file=io.StringIO()), "tokenise", 1000, 0) as shown:
        clock[0] = 1.0
        shown.show(500)
        shown.show(400)
        assert shown.speed() == "0.0 MB/s, 1 s left"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (99.4, "99 s"), (120, "2 min"), (5940, "99 min"), (8000, "2 h 13 min")]
)
def test_durations_read_as_people_say_them(seconds, text):
    assert duration(seconds) == text
