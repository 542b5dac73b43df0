"""The README's shell blocks run, in order, in one empty folder; a `make` line must be a target."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.app import app
from tests import commands
from tests.pages import shell_lines

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def run(line, folder, *, forked=False):
    """Run a line; `forked` spares `shoal` the start of a new Python."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "100",
    }
    words = shlex.split(line)
    if words[0] == "make":
        words, folder = ["make", "-n", *words[1:]], ROOT
    if forked and words[0] == "shoal":
        done = commands.Command(*words[1:], env=environment, folder=str(folder)).end(280)
    else:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("line", shell_lines(README))
def test_command_runs_with_a_few_steps(line, folder):
    run(re.sub(r"--steps \d+", "--steps 5", line), folder, forked=True)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_all_commands_run_as_they_stand(tmp_path):
    for line in shell_lines(README):
        run(line, tmp_path)


def test_the_two_commands_come_first():
    assert shell_lines(README)[:2] == ["make demo", "make test"]


def test_table_has_every_command_and_no_other():
    table = re.findall(r"(?m)^\|[^|]*\| `shoal (\w+)", README)
    assert set(table) == {name for name in app if not name.startswith("-")}


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_continued_lines_are_one_command_and_output_blocks_are_none():
    text = "```sh\na \\\n  b\nc\n```\n```text\nd\n```\n"
    assert [shlex.split(line) for line in shell_lines(text)] == [["a", "b"], ["c"]]


def test_failing_command_is_noticed(tmp_path):
    for forked in (False, True):
        with pytest.raises(AssertionError, match="no-such-command"):
            run("shoal no-such-command", tmp_path, forked=forked)
    with pytest.raises(AssertionError, match="no-such-target"):
        run("make no-such-target", tmp_path)
