"""What counts as a line of code."""

from tools import lines
from tools.lines import SOURCE, Room, code_lines, homeless, report

MODULE = '''"""A module.

Its text."""

import os  # why


def f(x):
    """Do."""
    # how
    return (
        x
    )
'''


def test_docstrings_comments_and_blank_lines_do_not_count():
    assert code_lines(MODULE) == 5


def test_a_text_that_is_used_counts():
    assert code_lines('x = """one\ntwo"""\n') == 2


def test_every_module_is_in_a_room_and_no_room_counts_another_s(capsys):
    assert homeless(SOURCE) == []
    owned = [path for room in lines.ROOMS for path in lines.modules_of(room, SOURCE)]
    assert len(owned) == len(set(owned))


def test_a_room_over_its_budget_and_a_module_in_none_fail(tmp_path, monkeypatch, capsys):
    (tmp_path / "hall").mkdir()
    (tmp_path / "hall/a.py").write_text(MODULE)
    assert report(Room("hall", ["hall"], 5), tmp_path)
    assert not report(Room("hall", ["hall"], 4), tmp_path)
    assert "OVER BUDGET" in capsys.readouterr().out
    monkeypatch.setattr(lines, "ROOMS", [Room("hall", ["hall"], 5)])
    (tmp_path / "stray.py").write_text("x = 1\n")
    assert homeless(tmp_path) == [str(tmp_path / "stray.py")]
