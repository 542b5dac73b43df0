"""What the launcher does to its workers, beside what faults of whole jobs show."""

import signal
import subprocess
import sys
import time

from shoal.runtime.launch import _Worker, _Workers

DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"
)


def test_a_survivor_that_does_not_handle_sigterm_is_killed_soon_and_waited_for():
    """As one that waits for a GPU is, which waits for a rank that is gone; its memory may go slowly."""
    workers = _Workers.__new__(_Workers)
    python = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, start_new_session=True)
    python.stdout.readline()
    workers.subprocess_handlers = {0: _Worker(python)}
    waits = []
    python.wait, wait = lambda timeout=None: (waits.append(timeout), wait(timeout))[1], python.wait
    began = time.monotonic()
    workers._close(signal.SIGTERM, timeout=30)
    assert python.returncode == -signal.SIGKILL
    assert 1 < waits[0] <= 5, waits
    assert waits[1] > 25, waits  # after SIGKILL
    assert time.monotonic() - began < 25
