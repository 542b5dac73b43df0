"""What `--help` shows, and how a mistake on the command line is worded."""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cyclopts import CycloptsError, Group
from cyclopts.exceptions import RepeatArgumentError, UnknownOptionError
from cyclopts.help import (
    ColumnSpec,
    DefaultFormatter,
    DescriptionRenderer,
    HelpEntry,
    HelpPanel,
    InlineText,
    NameRenderer,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

CHECK = Group("Check and measure", sort_key=3)
COMMANDS = Group.create_default_commands()
OPTIONS = Group.create_default_parameters("Options")
HELP_FLAGS = ("--help", "-h", "--help-all")  # of the commands that take settings
SETTINGS = "Settings"
RUN_DIR = ("--run-dir", "-o")
SHORT = {
    "steps": "train.steps",
    "lr": "optimizer.lr",
    "batch_size": "train.global_batch_size",
    "seq_len": "train.seq_len",
}
_MAIN = {
    "model": ("style", "n-layers", "d-model", "n-heads", "max-seq-len", "dropout"),
    "train": ("steps", "global-batch-size", "micro-batch-size", "seq-len", "seed", "recompute"),
    "optimizer": ("name", "lr", "weight-decay"),
    "schedule": ("kind", "warmup-steps"),
    "precision": ("dtype",),
    "sync": ("strategy",),
    "eval": ("every",),
    "checkpoint": ("every", "keep-last"),
    "runtime": ("device",),
}
_ELSEWHERE = {  # our options by what other programs call them
    "optimizer.lr": ("learning-rate",),
    "train.steps": ("max-steps", "max-iters", "epochs"),
    "train.global-batch-size": ("batch-size",),
    "train.seq-len": ("block-size", "context-length"),
    "schedule.warmup-steps": ("warmup-iters",),
    "model.n-layers": ("num-layers",),
    "model.n-heads": ("num-heads",),
    "model.d-model": ("n-embd", "hidden-size"),
    "run-dir": ("out-dir", "output-dir"),
}


class HelpPage(DefaultFormatter):
    """Show the main settings, or all of them, by section, with `--help-all`; `hidden` ones only then."""

    def __init__(self, hidden: Iterable[str] = ()) -> None:
        super().__init__(column_specs=_columns)
        self._hidden = {name.replace("_", "-") for name in hidden}

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one panel, or one for each section of the settings."""
        panel = panel.copy(entries=[_without_noise(entry) for entry in panel.entries])
        shown = [panel]
        if panel.title == SETTINGS:
            shown = _by_section(panel) if "--help-all" in sys.argv else [self._main(panel)]
        for each in shown:
            super().__call__(console, options, each)

    def _main(self, panel: HelpPanel) -> HelpPanel:
        main = {f"{section}.{name}" for section in _MAIN for name in _MAIN[section]} - self._hidden
        entries = [_brief(entry) for entry in panel.entries if _name(entry) in main]
        return panel.copy(title="Main settings (--help-all shows all)", entries=entries)


def usage_error(error: CycloptsError) -> str:
    """Word a mistake on the command line like every other error."""
    text = str(error)
    problems: list[Any] = getattr(error.__cause__, "errors", list)()  # pydantic's, which is not imported here
    if problems:
        text = "; ".join(
            f"--{'.'.join(map(str, p['loc']))} {p['input']}: {p['msg'].lower()}" for p in problems
        )
    elif isinstance(error, UnknownOptionError):
        given = error.token.keyword or str(error.token.value)
        near = suggestion(given, (name for argument in error.argument_collection for name in argument.names))
        text = f"unknown option {given}" + (f". Did you mean {near}?" if near else "")
    elif isinstance(error, RepeatArgumentError) and error.token.keyword in RUN_DIR:
        text = f"{' and '.join(RUN_DIR)} are the same option: give it once"
    return f"error: {text}\n  hint: see {' '.join(['shoal', *(error.command_chain or ())])} --help"


def suggestion(given: str, options: Iterable[str]) -> str | None:
    """Return the one of `options` that `given` was meant to be, or None.

    A field's name, or a word that is one, finds its section, or the likeliest of several.
    """
    names = [option.removeprefix("--") for option in options if option.startswith("--")]
    meant = {
        theirs: ours for ours, all_theirs in _ELSEWHERE.items() for theirs in all_theirs if ours in names
    }
    for name in sorted(names, key=lambda name: name.startswith("sync.")):
        meant.setdefault(name.rpartition(".")[2], name)
    meant |= {name: name for name in names}
    given = given.removeprefix("--").partition("=")[0].replace("_", "-")
    field = given.rpartition(".")[2]
    known = [name for name in (field, *field.split("-")) if name in meant]
    close = known or difflib.get_close_matches(given, meant, n=1)
    return f"--{meant[close[0]]}" if close else None


def _name(entry: HelpEntry) -> str:
    return entry.positive_names[0].removeprefix("--")


def _by_section(panel: HelpPanel) -> list[HelpPanel]:
    sections = itertools.groupby(panel.entries, lambda entry: _name(entry).partition(".")[0])
    return [panel.copy(title=f"{SETTINGS}: {section}", entries=list(found)) for section, found in sections]


def _brief(entry: HelpEntry) -> HelpEntry:
    """Keep the first sentence of a description."""
    first = re.split(r"(?<=\.)\s", _markup(entry))[0]
    return entry.copy(description=InlineText.from_format(first, "markdown"))


def _columns(
    console: Console, options: ConsoleOptions, entries: list[HelpEntry]
) -> tuple[ColumnSpec, ColumnSpec]:
    """Give names what they need, up to half of the line."""
    width = console.width // 2
    name = ColumnSpec(renderer=NameRenderer(max_width=width), style="cyclopts.name", max_width=width)
    return name, ColumnSpec(renderer=DescriptionRenderer(), overflow="fold")


def _markup(entry: HelpEntry) -> str:
    return str(getattr(entry.description.primary_renderable, "markup", ""))


def _without_noise(entry: HelpEntry) -> HelpEntry:
    """Leave out a default that is empty or stands in the text, and how a switch that is off is turned off."""
    if entry.default == "False":
        return entry.copy(default=None, negative_names=())
    default = entry.default or ""
    if default.startswith("("):
        default = re.sub(r"[(),']", "", default)  # a tuple, as it is typed
    told = default in ("", '""') or re.search(r"\(default: |Default: ", _markup(entry))
    return entry.copy(default=None if told else default)
