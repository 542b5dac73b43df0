"""What a rank says: rank 0 to the screen, every rank to its own file under ranks/."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from shoal.runtime.files import write_text

log = logging.getLogger("shoal")

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


def to_screen() -> None:
    """Send log messages to stdout as they are."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def to_rank_file(run_dir: Path, rank: int, attempt: int) -> None:
    """Log to ranks/rank-N/log and leave the process id beside it.

    Ranks other than 0 send stdout and stderr to the log as well.
    """
    folder = rank_folder(run_dir, rank)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "pid", str(os.getpid()))
    file = (folder / "log").open("a", buffering=1, encoding="utf-8")
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    if rank != 0:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    else:
        to_screen()
    handler.stream.write(f"--- attempt {attempt}, process {os.getpid()}\n")
