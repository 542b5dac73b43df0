"""Records name their commit, and it is told which of them are older than the code that they measure."""

import importlib.util
import json
import subprocess

import pytest

from tools import records
from tools.records import ENTRIES, FOLDER, ROOT, Entry, commits_of, run, stamp, states

PATHS = sorted({path for entry in ENTRIES.values() for path in entry.paths})
FILES = sorted((ROOT / FOLDER).glob("*.json"))


def git(folder, *words):
    made = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    done = subprocess.run([*made, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder, *files):
    """Write files, commit them and return the commit."""
    for name, text in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "one")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with code that a record measures and code that it does not."""
    monkeypatch.setattr(records, "ENTRIES", {"one": Entry(["one"], 1, ["measured"])})
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, ("measured/code.py", ""), ("elsewhere/code.py", ""))
    return tmp_path


def state(folder):
    (found,) = states(folder)
    return found


def write(folder, **keys):
    file = folder / FOLDER / "one.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"name": "one", "date": "2026-01-01", **keys}))


def test_a_record_is_stale_once_what_it_measures_was_changed(repository):
    write(repository, commit=git(repository, "rev-parse", "HEAD"), clean=True)
    commit(repository, ("elsewhere/code.py", "changed"))
    assert not state(repository).stale
    commit(repository, ("measured/code.py", "changed"))
    assert state(repository).stale
    assert (state(repository).changed, state(repository).commits) == (["measured/code.py"], 1)


def test_a_record_of_code_that_was_not_committed_is_stale(repository):
    write(repository, commit=git(repository, "rev-parse", "HEAD"), clean=False)
    assert "not committed" in state(repository).why
    assert state(repository).stale


def test_a_record_is_as_old_as_its_oldest_figures(repository):
    """`benchmarks.gradsync convergence` adds trainings to a record."""
    first = git(repository, "rev-parse", "HEAD")
    later = commit(repository, ("measured/code.py", "changed"))
    write(repository, commit=later, clean=True, cells=[{"commit": later}, {"commit": first}])
    assert state(repository).commit == first
    assert state(repository).stale


def test_a_commit_that_no_clone_has_gives_way_to_the_one_that_brought_the_record(repository):
    write(repository, commit="0" * 40, clean=True)
    brought = commit(repository)
    assert state(repository).commit == brought


def test_an_old_record_gets_the_commit_that_brought_it_and_is_not_called_clean(repository):
    write(repository)
    brought = commit(repository)
    stamp(repository)
    told = json.loads((repository / FOLDER / "one.json").read_text())
    assert (told["commit"], told["committed_with"], told["clean"]) == (None, brought, None)


def test_what_is_stale_is_renewed_and_a_failure_does_not_end_the_rest(repository, monkeypatch, capsys):
    """The commands here do not exist, so both fail."""
    entries = {name: Entry([f"no_such_module_{name}"], 7, ["measured"]) for name in ("one", "two")}
    monkeypatch.setattr(records, "ENTRIES", entries | {"three": Entry(["three"], 1, ["measured"], "root")})
    assert run((), repository) == 2
    said = capsys.readouterr().out
    assert "14 minutes in all" in said
    assert "one two" in said
    assert "three" not in said


@pytest.mark.parametrize("name", ["nonsense", "kill_storm"])
def test_what_is_not_renewed_by_a_benchmark_is_refused_with_what_does(name):
    with pytest.raises(SystemExit, match="make proof" if name == "kill_storm" else "cpu_train"):
        run([name])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_record_is_known_and_names_its_commit(file):
    record = json.loads(file.read_text())
    assert file.stem in ENTRIES
    assert all(len(one) == 40 for one in commits_of(record))
    assert commits_of(record)
    assert "clean" in record


def test_the_page_of_benchmarks_has_their_times():
    page = (ROOT / "docs/benchmarks.md").read_text()
    timed = [name for name, entry in ENTRIES.items() if entry.paths[0].startswith("benchmarks/")]
    said = [name for name in timed if ENTRIES[name].needs not in ("hours", "a GPU")]
    rows = [f"| `{name}` | {ENTRIES[name].minutes} min |" for name in said]
    assert [row for row in rows if row not in page] == []


def test_what_records_measure_and_what_writes_them_exists():
    assert [path for path in PATHS if not (ROOT / path).exists()] == []
    modules = [entry.command[0] for entry in ENTRIES.values() if not isinstance(entry.command, str)]
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
