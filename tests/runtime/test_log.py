"""Messages and the progress line on a terminal, in a pipe, and in a rank's file."""

from __future__ import annotations

import os
import pty
import select
import sys

import pytest

from shoal.runtime.log import log, show_progress, to_rank_file, wrapped


@pytest.fixture
def terminal(monkeypatch, tmp_path):
    """Return a function that has rank 0 log to a terminal of 40 columns and returns what reads that."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)

    def start():
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setenv("TERM", "xterm")
        to_rank_file(tmp_path, 0, 0)
        return read

    def read(at_least=1):
        found = b""  # what is written in two pieces may come in two
        while len(found) < at_least and select.select([ours], [], [], 5)[0]:
            found += os.read(ours, 1 << 16)
        return found.decode()

    with os.fdopen(theirs, "w") as screen:
        yield start
    os.close(ours)


@pytest.fixture(autouse=True)
def own_log(monkeypatch):
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    level = log.level
    yield
    log.setLevel(level)


def test_a_message_takes_the_place_of_the_progress_line_which_comes_back_below(terminal, tmp_path):
    read = terminal()
    show_progress("step 5/10", 0.5)
    bar = "━" * 14
    drawn = f"\r\x1b[Kstep 5/10  {bar}\x1b[2m{bar}\x1b[0m"
    assert read() == drawn
    log.info("step 5 is done")
    show_progress("step 6/10", 0.6)
    show_progress("")  # at once, while another step's line has to wait
    expected = f"\r\x1b[Kstep 5 is done\r\n{drawn}\r\x1b[K"
    assert read(len(expected.encode())) == expected
    content = (tmp_path / "ranks/rank-0/log").read_text()
    assert "INFO step 5 is done" in content
    assert "\x1b" not in content
    assert "5/10" not in content


def test_a_terminal_too_narrow_for_a_bar_shows_the_words(terminal, tmp_path):
    read = terminal()
    show_progress("x" * 38, 0.5)
    assert read() == "\r\x1b[K" + "x" * 38


def test_a_message_that_is_too_long_is_wrapped_between_words(terminal, tmp_path):
    read = terminal()
    log.info(
        "one two three four five six seven eight nine\nand /a/path/that/is/longer/than/the/whole/line/is"
    )
    assert read().replace("\r\x1b[K", "").split("\r\n") == [
        "one two three four five six seven eight",
        "    nine",
        "and",
        "    /a/path/that/is/longer/than/the/whole/line/is",
        "",
    ]


@pytest.mark.parametrize("verbose", [False, True])
def test_details_are_on_the_screen_when_asked_for_and_in_the_file_always(tmp_path, capsys, verbose):
    to_rank_file(tmp_path, 0, 0, verbose=verbose)
    log.debug("a detail")
    log.info("a message")
    assert capsys.readouterr().out == "a detail\n" * verbose + "a message\n"
    assert "DEBUG a detail" in (tmp_path / "ranks/rank-0/log").read_text()


def test_what_is_no_terminal_gets_messages_as_they_are(tmp_path, capsys):
    to_rank_file(tmp_path, 0, 0)
    show_progress("step 5/10", 0.5)
    log.info("word " * 40)
    show_progress("")
    assert capsys.readouterr().out == "word " * 40 + "\n"


def test_lines_that_fit_stay_as_they_are():
    assert wrapped("  a   b ", 10, "    ") == "  a   b "
