"""What the launcher does to its workers, beside what faults of whole jobs show."""

import signal
import subprocess
import sys
import time

from shoal.errors import EXIT_STOPPED
from shoal.launch.launcher import _Agent, _Worker, _Workers
from shoal.runtime.failure import Failure
from shoal.runtime.stop import stop_marker

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
    assert workers.killed == {0}


def test_a_stop_that_ended_ranks_says_what_is_true_after_hours_too(tmp_path, capsys, caplog):
    agent = _Agent.__new__(_Agent)
    agent._run_dir, agent._last_failure = tmp_path, Failure(0, 0.0, "killed by SIGTERM", secondary=True)
    stop_marker(tmp_path).parent.mkdir()
    stop_marker(tmp_path).touch()
    with caplog.at_level("INFO"):
        assert agent.report_end() == EXIT_STOPPED
    said = caplog.text + "".join(capsys.readouterr())
    assert "stopped without saving; the last committed checkpoint, if any, is kept" in said
    assert "nothing to save" not in said
