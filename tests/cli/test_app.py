"""The command line as a whole: quick, helpful, and never silent about a mistake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import get_args

import pytest

from shoal.cli import app as cli
from shoal.cli.app import app
from shoal.config.sections import Config

COMMANDS = sorted(name for name in app if not name.startswith("-"))
GROUPS = {
    "bench": ("collectives",),
    "checkpoint": ("gather", "ls", "verify", "rm"),
    "dataset": ("ls", "verify", "show"),
}
LEAVES = [
    (name, *sub) for name in COMMANDS for sub in ([(s,) for s in GROUPS[name]] if name in GROUPS else [()])
]


def shoal(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "shoal", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
    )


def help_seconds():
    """Processor time of one `shoal --help`: what a user waits for where nothing else runs."""
    command = [sys.executable, "-m", "shoal", "--help"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_answers_in_under_0_3_seconds():
    assert any(help_seconds() < 0.3 for _ in range(40))  # others may share the core for a while


def test_help_loads_no_heavy_package():
    script = "import sys; from shoal.cli.app import app; app(['--help'], result_action='return_value')\n"
    script += "print(sorted({name.split('.')[0] for name in sys.modules}), len(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"torch", "numpy", "daft", "transformers", "tokenizers", "pyarrow", "pydantic"}
    assert not {name for name in heavy if f"'{name}'" in done.stderr}


def test_help_lists_every_command():
    assert COMMANDS
    listed = shoal("--help").stdout
    assert [name for name in COMMANDS if not re.search(rf"│ {name} ", listed)] == []


@pytest.mark.parametrize("command", LEAVES, ids=" ".join)
def test_every_command_shows_an_example(command):
    done = shoal(*command, "--help")
    assert done.returncode == 0
    assert f"shoal {' '.join(command)}" in done.stdout.partition("xample")[2]


def test_version_is_printed():
    assert re.match(r"\d+\.\d+\.\d+", shoal("--version").stdout)


def test_unknown_command_is_exit_status_2_and_names_the_nearest():
    done = shoal("doctr")
    assert done.returncode == 2
    assert '"doctor"' in done.stderr


def test_unknown_option_is_exit_status_2_and_names_the_nearest():
    done = shoal("doctor", "--jsn", "x")
    assert done.returncode == 2
    assert "--json" in done.stderr


def test_terminal_without_the_characters_gets_replacements(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "shoal", "checkpoint", "ls", "größe"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: gr??e")


def test_value_of_the_wrong_kind_is_a_sentence_with_the_option_and_the_value():
    done = shoal("train", "tiny", "--train.steps", "0", "--train.seq_len", "x")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: --train.steps 0: input should be greater than 0; --train.seq_len x: "
    )
    assert "pydantic" not in done.stderr


@pytest.mark.parametrize("target", ["", "nowhere/x.json"])
@pytest.mark.parametrize(
    "command",
    ["doctor", "prepare stdlib --output out", "evaluate nothing", "parity tiny --layouts dp2"],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, command, target):
    done = shoal(*command.split(), "--json", str(tmp_path / target), cwd=tmp_path)
    assert done.returncode == 2
    words = "there is no such folder" if target else "is a folder"
    assert f"error: {tmp_path / target}" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())  # nor was anything begun


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),  # who says how threads wait knows why
    ],
)
def test_openmp_s_threads_do_not_wait_in_a_loop_for_long(monkeypatch, given, found):
    seen = []
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "app", lambda **how: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    with pytest.raises(SystemExit):
        cli.main()
    assert seen == [found]


def settings_with_another_value():
    """Yield section, field and a valid value that is not the default, as it is typed."""
    others = {"parallel.zero": "3", "train.profile": None}
    for section, values in Config().model_dump().items():
        for field, default in values.items():
            name = f"{section}.{field}"
            choices = get_args(type(getattr(Config(), section)).model_fields[field].annotation)
            if isinstance(default, bool):
                value = "" if not default else None
            elif isinstance(default, str):
                value = next((choice for choice in choices if choice != default), None)
            else:
                value = str(default) if isinstance(default, int | float) else None
            if (value := others.get(name, value)) is not None:
                yield section, field, value


@pytest.mark.parametrize(("section", "field", "value"), list(settings_with_another_value()))
def test_every_setting_can_be_given_on_the_command_line(section, field, value):
    option = f"--{section}.{field.replace('_', '-')}"
    _, bound, _ = app.parse_args(["train", "tiny", option, *([value] if value else [])])
    given = getattr(getattr(bound.arguments["settings"], section), field)
    assert str(given) == (value or "True")
