"""Messages of a rank: rank 0's on the screen, every rank's in its own file under ranks/.

Details have the level DEBUG: they are in the file always, and on the screen with --verbose.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import TextIO

from shoal.runtime.files import write_text

log = logging.getLogger("shoal")
_CLEAR = "\r\x1b[K"  # the line of a terminal that the cursor is in

# Chatter of libraries that tells a user nothing: seen on torch 2.11 to 2.13 over gloo.
_NOISY = (
    "torch.distributed.elastic",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed.nn.jit.instantiator",
    "torch.distributed._tensor",
    "torch.distributed.tensor",
    "torch.numa",
)


def rank_folder(run_dir: Path, rank: int) -> Path:
    """Return the folder that holds a rank's log and error.json."""
    return run_dir / "ranks" / f"rank-{rank}"


def quieten_libraries() -> None:
    """Keep library loggers silent below an error."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo's and the store's C++ warnings


class _Screen(logging.StreamHandler[TextIO]):
    """stdout: messages as they are; on a terminal wrapped between words, with the progress line below them.

    Each write begins by clearing the line, as the process that has drawn the progress may be another one.
    """

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self._on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._line, self._drawn_at = "", 0.0

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._on_terminal:
            return text
        columns = shutil.get_terminal_size().columns
        return _CLEAR + "\n".join(wrapped(line, columns, "    ") for line in text.split("\n"))

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self._draw()

    def show(self, text: str, share: float) -> None:
        """Show another progress line, at most ten times a second or with a message; an empty one at once."""
        if not self._on_terminal:
            return
        room = max(0, min(40, shutil.get_terminal_size().columns - len(text) - 3)) if text else 0
        done = round(share * room)
        self._line = f"{text}  {'━' * done}\x1b[2m{'━' * (room - done)}\x1b[0m" if room else text
        if text and time.monotonic() - self._drawn_at < 0.1:
            return
        with self.lock or contextlib.nullcontext():
            self._draw()

    def _draw(self) -> None:
        if self._on_terminal:
            self._drawn_at = time.monotonic()
            with contextlib.suppress(OSError):  # in one piece, past a buffer that a signal may have cut into
                os.write(self.stream.fileno(), f"{_CLEAR}{self._line}".encode())


def wrapped(text: str, width: int, indent: str) -> str:
    """Break a line between words, and indent all but the first part. Long words, as paths, stay whole."""
    if len(text) <= width:
        return text
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def to_screen(*, verbose: bool = False) -> None:
    """Send log messages to stdout; with `verbose`, details too."""
    handler = _Screen()
    handler.setLevel(logging.DEBUG if verbose else logging.INFO)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False


def show_progress(text: str, share: float = 0.0) -> None:
    """Show a line with a bar of the share done below the log, on a terminal; an empty text removes it."""
    for handler in log.handlers:
        if isinstance(handler, _Screen):
            handler.show(text, share)


def to_rank_file(run_dir: Path, rank: int, attempt: int, *, verbose: bool = False) -> None:
    """Log to ranks/rank-N/log, rank 0 to the screen too, and leave the process id beside it.

    Ranks other than 0 send stdout and stderr to the log as well.
    """
    folder = rank_folder(run_dir, rank)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "pid", str(os.getpid()))
    file = (folder / "log").open("a", buffering=1, encoding="utf-8")
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    if rank != 0:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    else:
        to_screen(verbose=verbose)
    handler.stream.write(f"--- attempt {attempt}, process {os.getpid()}\n")
