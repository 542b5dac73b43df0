"""What counts as a line of code."""

from tools.lines import code_lines

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
