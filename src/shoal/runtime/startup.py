"""The first moments of a command: stop requests are heard before anything is loaded; loading is announced."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shoal.errors import EXIT_STOPPED

LAUNCHED = "SHOAL_LAUNCHED"  # the launcher's process id, in the environment of its workers
REPLICA_GROUP = "SHOAL_REPLICA_GROUP"  # tells a replica that is a world of its own its place
# By which a stop is asked for. A whole process group or job step may get them; its launcher passes them on.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WHEN_STOPPED = {
    "train": "stopped before the first step; nothing to save",
    "prepare": "stopped before anything was done; run the same command again",
}


class Stopped(KeyboardInterrupt):
    """A stop request, by the signal's name.

    A class of its own: where a plain KeyboardInterrupt has passed an exec(), as in dataclasses, Python ends
    itself by SIGINT in the end, whatever status was given.
    """

    by = ""  # its name, once it was raised: a library that is being loaded may swallow it, and fail later


def install_stop_handlers() -> None:
    """Install the handlers that stand until a command has its own, except where a signal is ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def announce_loading(what: str = "") -> None:
    """Tell on stderr that torch is loaded now, which takes seconds; quiet where it is there already.

    Launched workers, and ranks other than 0, are quiet, too.
    """
    from shoal.runtime.rank_info import read_rank_info

    info = read_rank_info()
    if "torch" not in sys.modules and not _is_launched() and (info is None or info.rank == 0):
        sys.stderr.write(f"{what}loading torch …\n")  # in one piece, whatever signal comes
        sys.stderr.flush()


@contextmanager
def loading() -> Iterator[None]:
    """Announce that torch is loaded, and look for no garbage among what the block imports.

    A stop request that a library swallowed in the block is raised at its end.
    """
    announce_loading()
    gc.disable()
    try:
        yield
    finally:
        all_is_loaded()
    if Stopped.by:
        raise Stopped(Stopped.by)


def all_is_loaded() -> None:
    """Leave the million objects of imported modules to the end: no garbage collection looks at them again.

    A quarter of a short run's processor time was such looking, while it loaded and when it ended. Before the
    imports: gc.disable().
    """
    gc.freeze()
    gc.enable()
    atexit.register(_unfreeze)


def _unfreeze() -> None:
    """Have them collected when Python ends, if triton is loaded: 3.9 prints what is left."""
    if "triton" in sys.modules:
        gc.unfreeze()


def _stop(number: int, _frame: FrameType | None) -> None:
    """End a command that has nothing to save at once; let any other one clean up behind itself.

    An exception would be lost in libraries that are being loaded, some of which catch all.
    """
    if _is_launched():
        os._exit(128 + signal.SIGTERM)  # its launcher tells the user
    name = signal.Signals(number).name
    if sentence := _WHEN_STOPPED.get("".join(sys.argv[1:2])):
        os.write(2, f"\n{name}: {sentence}\n".encode())
        os._exit(EXIT_STOPPED)
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)  # once more ends it
    Stopped.by = name
    sys.unraisablehook = _end_if_lost
    raise Stopped(name)


def _end_if_lost(lost: sys.UnraisableHookArgs) -> None:
    """End at once where Python drops the exception: in `__del__`, and in callbacks, as its imports have."""
    if lost.exc_type is Stopped:
        os.write(2, f"stopped by {Stopped.by}\n".encode())
        os._exit(128 + signal.Signals[Stopped.by])
    sys.__unraisablehook__(lost)


def _is_launched() -> bool:
    launcher = os.environ.get(LAUNCHED, "")  # a launcher sets it for its workers, and has it, too
    return REPLICA_GROUP in os.environ or launcher not in ("", str(os.getpid()))
