"""The command line as a whole: quick, helpful, and never silent about a mistake."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from typing import get_args

import docstring_parser
import pytest
from cyclopts import App, CycloptsError

from shoal.cli import app as cli
from shoal.cli.app import app
from shoal.cli.help import usage_error
from shoal.cli.setup import completion, config
from shoal.config.load import config_from_toml, load_config, preset_names
from shoal.config.sections import Config, Section
from shoal.errors import InputError
from tests import commands

COMMANDS = sorted(name for name in app if not name.startswith("-"))
GROUPS = {
    "bench": ("collectives",),
    "checkpoint": ("gather", "ls", "verify", "rm"),
    "dataset": ("ls", "verify", "show"),
}
LEAVES = [
    (name, *sub) for name in COMMANDS for sub in ([(s,) for s in GROUPS[name]] if name in GROUPS else [()])
]


def test_help_answers_in_under_0_3_seconds():
    """Or, on a slow machine, within half as much again as the smallest program of the same library."""
    ours, smallest = [], []
    for _ in range(10):  # others may share the core for a while
        ours.append(commands.processor_seconds("-m", "shoal", "--help"))
        if ours[-1] < 0.3:
            return
        smallest.append(commands.processor_seconds("-c", commands.SMALLEST))
        if len(ours) > 4 and min(ours) < 1.5 * min(smallest):
            return
    raise AssertionError((ours, smallest))


def test_help_loads_no_heavy_package():
    script = "import sys; from shoal.cli.app import app; app(['--help'], result_action='return_value')\n"
    script += "print(sorted({name.split('.')[0] for name in sys.modules}), len(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"torch", "numpy", "ray", "transformers", "tokenizers", "pyarrow", "pydantic"}
    assert not {name for name in heavy if f"'{name}'" in done.stderr}


@pytest.mark.parametrize("words", [("train", "--help"), ("completion", "bash")])
def test_docstrings_of_a_class_are_read_once(words, monkeypatch, capsys):
    read, of = [], inspect.getsource
    monkeypatch.setattr(docstring_parser, "parse_from_object", docstring_parser.parse_from_object)
    monkeypatch.setattr(inspect, "getsource", lambda which: read.append(which) or of(which))
    monkeypatch.setattr(sys, "argv", ["shoal", *words])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "--model.n-layers" in capsys.readouterr().out
    assert Section in read
    assert len(read) == len(set(read))


def help_of(*command, monkeypatch, capsys):
    """Print a help page on 80 columns, in this process."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["shoal", *command])
    app(list(command), result_action="return_value")
    return capsys.readouterr().out


def test_help_lists_every_command(monkeypatch, capsys):
    assert COMMANDS
    listed = help_of("--help", monkeypatch=monkeypatch, capsys=capsys)
    assert [name for name in COMMANDS if not re.search(rf"│ {name} ", listed)] == []


@pytest.mark.parametrize("command", LEAVES, ids=" ".join)
def test_every_command_shows_an_example(command, monkeypatch, capsys):
    page = help_of(*command, "--help", monkeypatch=monkeypatch, capsys=capsys)
    assert f"shoal {' '.join(command)}" in page.partition("xample")[2]


def settings_in(page):
    return {name for name in re.findall(r"│ --([a-z][\w-]*\.[\w.-]+)", page) if ".no-" not in name}


@pytest.mark.parametrize("command", ["train", "parity", "advise"])
def test_help_shows_the_main_settings_and_names_the_page_with_all(command, monkeypatch, capsys):
    page = help_of(command, "--help", monkeypatch=monkeypatch, capsys=capsys)
    assert 15 <= len(settings_in(page)) <= 24
    assert "--help-all" in page
    assert ("optimizer.lr" in settings_in(page)) == (command != "train")  # there it has a short name
    assert len(page.splitlines()) < 120
    assert max(map(len, page.splitlines())) <= 80


def test_help_all_shows_every_setting_by_section(monkeypatch, capsys):
    page = help_of("train", "--help-all", monkeypatch=monkeypatch, capsys=capsys)
    every = {f"{s}.{name}".replace("_", "-") for s, fields in Config() for name, _ in fields}
    assert settings_in(page) == every
    assert "Settings: guard" in page
    assert max(map(len, page.splitlines())) <= 80


def told(capsys, *command):
    """Run a command that fails in this process; return what it prints."""
    with pytest.raises((CycloptsError, InputError)) as raised:
        app(list(command), result_action="return_value", print_error=False, exit_on_error=False)
    return usage_error(raised.value) if isinstance(raised.value, CycloptsError) else str(raised.value)


def given_to_load_config(monkeypatch, *command):
    """Return the overrides with which a command loads its configuration."""
    seen = []

    def load(source, overrides):
        seen.append(overrides)
        raise InputError("seen")

    monkeypatch.setattr("shoal.cli.train.load_config", load)
    with pytest.raises(InputError, match="seen"):
        app(["train", "tiny", *command], result_action="return_value", print_error=False)
    return seen[0]


def test_short_names_set_what_they_stand_for(monkeypatch):
    short = ("--steps", "3", "--lr", "0.5", "--batch-size", "6", "--seq-len", "7")
    assert given_to_load_config(monkeypatch, *short, "--train.seed", "1") == {
        "train": {"seed": 1, "steps": 3, "global_batch_size": 6, "seq_len": 7},
        "optimizer": {"lr": 0.5},
    }


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("--steps", "--train.steps"),
        ("--lr", "--optimizer.lr"),
        ("--batch-size", "--train.global-batch-size"),
        ("--seq-len", "--train.seq-len"),
        ("-o", "--run-dir"),
    ],
)
def test_a_short_name_beside_the_long_one_is_an_error_that_names_both(short, long, capsys):
    words = told(capsys, "train", "tiny", short, "4", long, "5")
    assert re.search(rf"{short}\b", words)
    assert long in words


@pytest.mark.parametrize(
    ("command", "given", "meant"),
    [
        ("train", "--learning-rate", "--optimizer.lr"),
        ("train", "--lr-rate", "--lr"),
        ("advise", "--lr", "--optimizer.lr"),
        ("parity", "--lr=3", "--optimizer.lr"),
        ("train", "--train.lr", "--lr"),
        ("train", "--n-layers", "--model.n-layers"),
        ("train", "--n_layer", "--model.n-layers"),
        ("advise", "--batch-size", "--train.global-batch-size"),
        ("train", "--optimizer.beta", "--optimizer.beta"),
        ("train", "--run-dri", "--run-dir"),
        ("train", "--output-dir", "--run-dir"),
    ],
)
def test_an_unknown_option_brings_to_mind_the_likely_one(command, given, meant, capsys):
    needed = ["--layouts", "dp2"] if command == "parity" else []
    words = told(capsys, command, "tiny", *needed, given, "3")
    assert f"unknown option {given}" in words or given.endswith("=3")
    assert f"Did you mean {meant}" in words


def test_an_option_like_no_other_brings_none_to_mind(capsys):
    words = told(capsys, "train", "tiny", "--zzz", "3")
    assert words == "error: unknown option --zzz\n  hint: see shoal train --help"


@pytest.mark.proof
def test_bash_takes_the_completion_script_and_completes_commands_and_options(tmp_path, capsys):
    completion("bash")
    script = tmp_path / "shoal.bash"
    script.write_text(capsys.readouterr().out)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0

    def completed(*words):
        line = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shoal; "
        line += 'echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("shoal", "tr") == ["train"]
    assert "verify" in completed("shoal", "checkpoint", "v")
    assert "--optimizer.lr" in completed("shoal", "train", "--optimizer.l")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_their_own(shell, monkeypatch, capsys):
    monkeypatch.setattr(
        App, "generate_completion", lambda self, *, prog_name, shell: f"{shell} of {prog_name}"
    )
    completion(shell)
    assert capsys.readouterr().out == f"{shell} of shoal"


def test_version_is_printed():
    assert re.match(r"\d+\.\d+\.\d+", commands.run("--version").stdout)


def test_unknown_command_is_exit_status_2_and_names_the_nearest():
    done = commands.run("doctr")
    assert done.returncode == 2
    assert '"doctor"' in done.stderr


def test_unknown_option_is_exit_status_2_and_names_the_nearest():
    done = commands.run("doctor", "--jsn", "x")
    assert done.returncode == 2
    assert "--json" in done.stderr


def test_terminal_without_the_characters_gets_replacements(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "shoal", "checkpoint", "ls", "größe"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: gr??e")


def test_value_of_the_wrong_kind_is_a_sentence_with_the_option_and_the_value():
    done = commands.run("train", "tiny", "--train.steps", "0", "--train.seq_len", "x")
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
    done = commands.Command(*command.split(), "--json", tmp_path / target, folder=tmp_path).end()
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


def value_of(section, field, default):
    """Return a valid value of a setting as it is typed, not its default where there is a choice, or None."""
    choices = get_args(type(getattr(Config(), section)).model_fields[field].annotation)
    if f"{section}.{field}" == "parallel.zero":
        return "3"
    if isinstance(default, bool):
        return "" if not default else None
    if isinstance(default, str):
        return next((choice for choice in choices if choice != default), None)
    return str(default) if isinstance(default, int | float) else None


@pytest.mark.parametrize("section", [name for name, _ in Config()])
def test_every_setting_can_be_given_on_the_command_line(section):
    defaults = getattr(Config(), section).model_dump().items()
    values = {field: value_of(section, field, default) for field, default in defaults}
    values = {field: value for field, value in values.items() if value is not None}
    words = [(f"--{section}.{field.replace('_', '-')}", value) for field, value in values.items()]
    _, bound, _ = app.parse_args(["train", "tiny", *(word for pair in words for word in pair if word)])
    given = getattr(bound.arguments["settings"], section)
    assert given.model_fields_set == values.keys()
    assert {field: str(getattr(given, field)) for field in values} == {
        field: value or "True" for field, value in values.items()
    }


@pytest.mark.parametrize("source", [None, *preset_names()])
def test_config_prints_every_setting_with_its_documentation_and_loads_back(source, capsys):
    config(source)
    printed = capsys.readouterr().out
    assert config_from_toml(printed, "printed") == (load_config(source) if source else Config())
    for section, fields in Config():
        for name, field in type(fields).model_fields.items():
            assert re.search(rf"^(# )?{name} =", printed.partition(f"\n[{section}]")[2], re.MULTILINE)
            assert field.description.split()[0] in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_config_tells_the_default_of_what_a_preset_sets(capsys):
    config("tiny")
    printed = capsys.readouterr().out
    assert "# Number of transformer blocks. Default: 12.\nn_layers = 4\n" in printed
    assert 'Values: adamw, sgd, muon. Default: "adamw".\nname = "adamw"\n' in printed.replace("\n# ", " ")
    assert "unset means warmup_fraction.\n# warmup_steps =\n" in printed


def test_config_takes_a_file(tmp_path, capsys):
    file = tmp_path / "my.toml"
    file.write_text("[train]\nsteps = 7\n")
    config(str(file))
    assert "\nsteps = 7\n" in capsys.readouterr().out
