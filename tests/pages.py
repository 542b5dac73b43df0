"""What pages of the documentation name: commands, options, presets and settings, and whether these exist."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib

from cyclopts import App

from shoal.cli.app import app
from shoal.config.load import preset_names, validate
from shoal.config.sections import Config
from shoal.errors import ConfigError

NO_SETTINGS = ("metrics.jsonl", "tokenizer.json", "config.json", "ckpt.pt", "train.bin")  # names of files


def shell_lines(text):
    """Return the command lines of all ```sh blocks."""
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", text)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def rows(page):
    """Return (theirs, ours) of each row of each table."""
    cells = [re.split(r" \| ", line.strip("| ")) for line in page.splitlines() if line.startswith("| ")]
    assert all(len(row) == 2 for row in cells), [row for row in cells if len(row) != 2]
    return [(theirs, ours) for theirs, ours in cells if not set(theirs) <= {"-"}]


def shoal_spans(page):
    """Return what stands in code font about Shoal: outside of tables, and in their second column."""
    prose = "\n".join(line for line in re.sub(r"(?ms)^```.*?^```", "", page).splitlines() if line[:1] != "|")
    return [
        span for text in (prose, *(ours for _, ours in rows(page))) for span in re.findall("`([^`]+)`", text)
    ]


def shoal_commands(page):
    """Return every command line: in code font, and in shell blocks."""
    return shell_lines(page) + [span for span in shoal_spans(page) if span.startswith("shoal ")]


@functools.cache
def options_of(*path: str) -> set[str]:
    """Return the options of a command or subcommand, with hyphens."""
    command = functools.reduce(App.__getitem__, path, app)
    names = {name for argument in command.assemble_argument_collection() for name in argument.names}
    return {name.replace("_", "-") for name in names}


def wrong_commands(page):
    """Find commands, options and presets that do not exist."""
    wrong = []
    for line in shoal_commands(page):
        _, name, *words = shlex.split(line)
        if name not in app:
            wrong.append(line)
            continue
        command, path = app[name], [name]
        while words and words[0] in command:
            command, path, words = command[words[0]], [*path, words[0]], words[1:]
        given = [word for word in words if word.startswith("--")]
        wrong += [f"{line}: {word}" for word in given if word.replace("_", "-") not in options_of(*path)]
        if name == "train" and words and words[0][0] != "-" and not words[0].endswith(".toml"):
            wrong += [line] * (words[0] not in preset_names())
    return wrong


def wrong_settings(page):
    """Find settings that do not exist, or would not take the value that the page gives them."""
    wrong = []
    for span in shoal_spans(page):
        found = re.fullmatch(r"([a-z_]+)\.([a-z_0-9]+)( = .+)?", span)
        if not found or span in NO_SETTINGS:
            continue
        section, field, value = found.groups()
        fields = Config.model_fields
        if section not in fields or field not in fields[section].annotation.model_fields:
            wrong.append(span)
            continue
        try:
            validate({section: tomllib.loads(field + value) if value else {}}, span)
        except ConfigError:
            wrong.append(span)
    return wrong
