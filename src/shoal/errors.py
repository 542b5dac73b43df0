"""Errors that a person can act on; the CLI turns each into a sentence and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: stopped on request, everything saved, run it again


class ShoalError(Exception):
    """Say what was given and what is allowed (`message`), and what to do (`hint`)."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class InputError(ShoalError):
    """A file, folder or argument that cannot be used as it is."""

    exit_code = EXIT_BAD_INPUT


class ConfigError(InputError):
    """A setting, or a combination of settings, that is not allowed."""


class DataError(InputError):
    """A dataset, text file or tokenizer that is damaged, changed or does not fit."""


class CheckpointError(ShoalError):
    """A checkpoint that cannot be written, verified or loaded."""


class UnreadableError(ShoalError):
    """A file that could not be read this time; nothing is known about what is in it."""


class StoppedError(ShoalError):
    """The user or the scheduler asked for a stop; what was done so far is kept."""

    exit_code = EXIT_STOPPED


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return 'did you mean X?' for the closest of `allowed`, or the whole list where nothing is close."""
    allowed = list(allowed)
    close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"


def counted(number: int, noun: str) -> str:
    """Return '1 process' or '2 processes': a number with its noun, which adds s or es."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending if number != 1 else ''}"
