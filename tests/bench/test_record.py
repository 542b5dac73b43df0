"""What every record says of the code that was measured, and of the machine."""

import subprocess

import pytest

from shoal.bench import record


def git(folder, *words):
    made = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    done = subprocess.run([*made, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with code, a record and a page, all committed."""
    for name in ("src/shoal/bench/code.py", "benchmarks/records/one.json", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "all")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "clean"),
    [
        ("src/shoal/bench/code.py", False),
        ("benchmarks/new.py", False),
        ("benchmarks/records/one.json", True),
        ("docs/page.md", True),
    ],
)
def test_code_that_is_not_committed_makes_the_tree_unclean_and_nothing_else_does(repository, changed, clean):
    code = repository / "src/shoal/bench"
    assert record.source(code) == (git(repository, "rev-parse", "HEAD"), True)
    (repository / changed).write_text("changed")
    assert record.source(code) == (git(repository, "rev-parse", "HEAD"), clean)


def test_the_repository_around_an_installed_copy_is_not_its_own(repository):
    installed = repository / ".venv/lib/shoal/bench"
    installed.mkdir(parents=True)
    (installed / "record.py").write_text("")
    assert record.source(installed) == (None, None)


def test_a_folder_without_a_repository_has_no_commit(tmp_path):
    assert record.source(tmp_path) == (None, None)


def test_code_that_is_changed_while_it_is_measured_is_told(monkeypatch):
    record.begin.cache_clear()
    monkeypatch.setattr(record, "source", lambda: ("a" * 40, True))
    record.begin()
    head = record.describe("one")
    assert (head["commit"], head["clean"]) == ("a" * 40, True)
    assert [len(head["load"][when]) for when in ("before", "after")] == [3, 3]
    monkeypatch.setattr(record, "source", lambda: ("b" * 40, True))
    head = record.describe("one")
    assert (head["commit"], head["clean"]) == ("a" * 40, False)
    record.begin.cache_clear()
