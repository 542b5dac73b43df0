"""Figures in README, CHANGELOG and docs are those of records, and there are no others."""

import pytest

from tools import figures
from tools.figures import check, locate, uncovered, v


def test_pages_say_what_the_records_do_and_no_figure_more():
    assert check() == [], "python -m tools.figures --write puts the figures of renewed records into the pages"


@pytest.mark.parametrize(
    "figure",
    [
        *(
            "8.7 to 1.5 GB",
            "0.5 to 0.7 s instead of 5 to 6",
            "3.1 % behind",
            "7 MB/s",
            "+18 % of the rate",
            "took 28 s",
        ),
        *(
            "1,488 tokens/s",
            "0.97 of its speed",
            "4 times as fast",
            "7 us an operation",
            "| 2.10 |",
            "**1.014**",
        ),
        *("at most 2e-7 apart", "30 ms", "within 12 minutes", "12 min", "2 hours", "68s", "12MB/s"),
        *("5,000 tokens a second", "1,200 requests per second", "3x faster", "1.5x the speed"),
        *("a 40-percent gain", "9 thousand tokens/s"),
    ],
)
def test_a_figure_without_a_record_is_found(figure):
    assert uncovered("docs/new.md", f"Here it was {figure} in all.", [])


@pytest.mark.parametrize(
    "words",
    ["with torch 2.11 or newer", "`--timeout 30 s`", "two cores", "step 100", "[this](page-of-1.5.md)"],
)
def test_versions_code_and_counts_are_no_figures(words):
    assert uncovered("docs/new.md", f"Here it is {words} in all.", []) == []


def test_the_lines_of_a_transcript_are_examples_and_lists_are_not():
    assert uncovered("docs/new.md", "Such as\n\n    took 3.5 s\n\n```\n4.5 s\n```\n", []) == []
    assert len(uncovered("docs/new.md", "- so\n\n    - took 3.5 s\n\n    | 4.5 s |\n", [])) == 2
    assert len(uncovered("docs/new.md", "Such as\n\n    took 3.5 s\n\nIt took 4.5 s.\n", [])) == 1


CLAIM = f"It makes {v(1510.4, ',.0f')} tokens/s, {v(1.0149, '.2f')} times the other's."


def test_a_sentence_is_found_with_other_figures_and_over_lines():
    found = locate("docs/new.md", CLAIM, "So. It makes 987 tokens/s,\n0.9 times the other's. Then")
    assert [(one.said, one.wanted) for one in found] == [
        ("987", "1,510"),
        ("0.9", "1.01"),
    ]


@pytest.mark.parametrize("times", [0, 2])
def test_a_sentence_that_a_page_has_not_once_is_told(times):
    text = "It makes 987 tokens/s, 0.9 times the other's. " * times
    assert f"{times} times this sentence" in locate("docs/new.md", CLAIM, text)


def test_a_fact_that_no_page_states_any_more_is_told(monkeypatch):
    monkeypatch.setattr(figures, "FACTS", {"docs/new.md": ("within 30 s", "64 MB")})
    (complaint,) = uncovered("docs/new.md", "It ends within 30 s.", [])
    assert "64 MB" in complaint


def test_figures_of_a_renewed_record_are_written_and_nothing_else_is_changed(tmp_path, monkeypatch, capsys):
    for name in ("README.md", "CHANGELOG.md"):
        (tmp_path / name).write_text("")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/new.md"
    page.write_text("# New\n\nIt takes 12.5 s and\n9.25 MB/s, which is 31 % of it all.\n")
    claim = f"takes {v(7.25, '.2f')} s and {v(100.0, '.1f')} MB/s, which is {v(8)} % of it"
    for name, value in {"ROOT": tmp_path, "FACTS": {}, "claims": lambda: [("docs/new.md", claim)]}.items():
        monkeypatch.setattr(figures, name, value)
    assert len(check()) == 3
    assert "12.5" in page.read_text()
    assert check(write=True) == []
    assert page.read_text() == "# New\n\nIt takes 7.25 s and\n100.0 MB/s, which is 8 % of it all.\n"
    assert check() == []
