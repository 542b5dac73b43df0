"""A pseudo-terminal on which `shoal` runs, and what it has shown."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
import unicodedata
from pathlib import Path

from tests.commands import Command

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal of some columns, which keeps all that is written to it."""

    def __init__(self, columns: int) -> None:
        self._ours, self.theirs = pty.openpty()
        self.columns = columns
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
        self._content = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, folder: Path, *arguments: object) -> Command:
        """Run `shoal ARGUMENTS` in a folder on this terminal."""
        return Command(
            *arguments,
            env={"TERM": "xterm", "COLUMNS": str(self.columns)},
            folder=str(folder),
            terminal=self.theirs,
        )

    def raw(self) -> str:
        """Return all that was written so far."""
        return self._content.decode(errors="replace")

    def close(self) -> None:
        """Close our end of what runs on it, and read what is left."""
        os.close(self.theirs)
        self._reader.join(10)
        os.close(self._ours)

    def _read(self) -> None:
        try:
            while more := os.read(self._ours, 1 << 16):
                self._content += more
        except OSError:  # the last writer is gone
            pass


def drawn(raw: str) -> list[str]:
    """Return each piece that was drawn from the first column on, without colours."""
    pieces = raw.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [_CONTROL.sub("", piece) for piece in pieces]


def left_over(raw: str) -> list[str]:
    """Return the lines that stay on the screen: what a line had before it was cleared is gone."""
    lines = raw.replace("\r\n", "\n").split("\n")
    return [_CONTROL.sub("", line.split("\r\x1b[K")[-1]) for line in lines]


def width(text: str) -> int:
    """Return the columns that a text takes."""
    return sum(2 if unicodedata.east_asian_width(letter) in "FW" else 1 for letter in text)
