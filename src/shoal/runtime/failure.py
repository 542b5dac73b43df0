"""Why a job failed: each rank leaves its error in a file; the first cause is reported, not what followed."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError
from shoal.runtime.files import read_json
from shoal.runtime.log import rank_folder

# How gloo, NCCL and the store word the loss of another rank.
_PEER_LOSS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "nccl communicator was aborted",
    "failed to recv, got 0 bytes",
    "timed out waiting",
    "connectfullmesh failed",
)


@dataclass(frozen=True)
class Failure:
    """How one rank ended. `secondary` marks a rank that failed only because another one had."""

    rank: int
    time: float
    sentence: str
    detail: str = ""
    exit_code: int = 1
    secondary: bool = False
    fatal: bool = False  # the same input would fail again: no restart

    def __str__(self) -> str:
        return f"{self.detail.rstrip()}\n{self.sentence}" if self.detail else self.sentence


def is_peer_loss(error: BaseException) -> bool:
    """Say whether an error only reports that another rank is gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _PEER_LOSS)


def record_failure(run_dir: Path, rank: int, attempt: int, error: BaseException | None) -> None:
    """Leave error.json for the launcher; `error` None means that this rank was told to go after a peer died.

    Written in place, without fsync: it must work while the process is falling, on a full disk perhaps.
    """
    report = {
        "time": time.time(),
        "attempt": attempt,
        "secondary": error is None or is_peer_loss(error),
        "fatal": isinstance(error, ShoalError),
        "exit_code": error.exit_code if isinstance(error, ShoalError) else 1,
        "message": str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}",
        "traceback": ""
        if error is None or isinstance(error, ShoalError)
        else "".join(traceback.format_exception(error)),
    }
    folder = rank_folder(run_dir, rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error.json").write_text(json.dumps(report, indent=2))
    except OSError:
        pass  # nothing left to tell it to; the exit status still speaks


def read_failure(run_dir: Path, rank: int, attempt: int, exit_code: int) -> Failure:
    """Describe how a rank ended from its exit status and the error.json of this attempt, if it left one."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = "\n  hint: SIGKILL often comes from the kernel when memory runs out" if exit_code == -9 else ""
        # The agent ends the survivors with SIGTERM, so that one is secondary.
        sentence = f"rank {rank} was killed by signal {-exit_code} ({name}){hint}"
        return Failure(rank, time.time(), sentence, secondary=-exit_code == signal.SIGTERM)
    path = rank_folder(run_dir, rank) / "error.json"
    with contextlib.suppress(ShoalError, KeyError, TypeError):  # none, or not one that a rank has left
        report = read_json(path, "error report")
        if report["attempt"] == attempt:
            return Failure(
                rank,
                report["time"],
                f"rank {rank}: {report['message']}",
                report["traceback"],
                report["exit_code"],
                report["secondary"],
                report["fatal"],
            )
    sentence = f"rank {rank} ended with status {exit_code}; see {path.parent / 'log'}"
    # Told twice, by the user and by the agent that ends the survivors, a rank leaves with this status.
    return Failure(rank, time.time(), sentence, secondary=exit_code == 128 + signal.SIGTERM)


def first_cause(run_dir: Path, attempt: int, exit_codes: Mapping[int, int]) -> Failure:
    """Choose the failure that explains the others: the earliest that is not secondary."""
    failures = [read_failure(run_dir, rank, attempt, code) for rank, code in exit_codes.items() if code != 0]
    return min(failures, key=lambda failure: (failure.secondary, failure.time))
