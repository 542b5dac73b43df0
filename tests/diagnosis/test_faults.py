"""Jobs that hang, disagree or lose a rank: real processes, and the one sentence that the launcher ends with.

The faults come from a sitecustomize.py that each command runs first; Shoal itself has no switch for them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests import commands
from tests.diagnosis.faults import LIMITS, SHAPE, SLEEP, told
from tests.train.commands import Running, command, shoal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc")
HANG_S = 4.0
LIMITS += ("--runtime.hang_s", str(HANG_S), "--runtime.timeout_s", "300")


def verdict_of(data, tmp_path, fault, nproc="2", hang_s=HANG_S):
    """Train with a fault of rank 1 in step 7; return the screen, the run, and the seconds since the fault."""
    code = f"""\
    import os, time
    def unwell(step):
        if step == 7 and os.environ.get("RANK") == "1":
            open({str(tmp_path / "began")!r}, "w").write(str(time.time()))
            return True
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(code) + textwrap.dedent(fault))
    env = commands.planted(tmp_path)
    settings = ("--train.micro_batch_size", "2", "--runtime.hang_s", str(hang_s))
    status, screen = shoal(data, tmp_path / "run", "--nproc", nproc, *LIMITS, *settings, env=env)
    took = time.time() - float((tmp_path / "began").read_text())
    assert status == 1, screen
    assert took < hang_s + 30
    return screen.splitlines(), tmp_path / "run", took


@pytest.mark.parametrize("nproc", ["2", pytest.param("4", marks=pytest.mark.proof)])
def test_a_rank_that_sleeps_in_the_loader_is_named_with_its_line(data, tmp_path, nproc):
    screen, run, took = verdict_of(data, tmp_path, SLEEP, nproc)
    waiting = "rank 0 waits" if nproc == "2" else "ranks 0, 2-3 wait"
    assert re.fullmatch(
        rf"rank 1 is in data of step 7, batch at sitecustomize\.py:\d+; {waiting} in all_reduce \d+\b.*",
        told(screen),
    ), screen
    assert took > HANG_S - 1
    (folder,) = (run / "postmortem").iterdir()
    assert (folder / "verdict.txt").read_text().strip() == told(screen)
    assert "sitecustomize.py" in (folder / "rank-1.stack.txt").read_text()
    recorded = json.loads((folder / "rank-0.json").read_text())
    assert recorded["step"] == 7
    assert recorded["operations"][-1]["name"] == "all_reduce"


SKIP = """
import torch
from shoal.gradsync.during_backward import SumDuringBackward
start, calls = SumDuringBackward._start, [-1]  # the first one settles the buckets
def skipping(self, state, bucket):
    calls[0] += 1
    if unwell(calls[0]):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    return start(self, state, bucket)
SumDuringBackward._start = skipping
"""


@pytest.mark.parametrize("nproc", ["2", pytest.param("4", marks=pytest.mark.proof)])
def test_a_rank_that_skips_a_collective_is_named_with_it(data, tmp_path, nproc):
    screen, *_ = verdict_of(data, tmp_path, SKIP, nproc)
    assert re.match(r"rank 1 skipped all_reduce \d+.*; rank.* wait", told(screen)), screen


@pytest.mark.parametrize("nproc", ["2", pytest.param("4", marks=pytest.mark.proof)])
def test_a_rank_that_sends_another_shape_is_named_before_any_time_out(data, tmp_path, nproc):
    screen, _, took = verdict_of(data, tmp_path, SHAPE, nproc, hang_s=100)
    assert took < 30, "only the limit found it"
    assert re.match(
        r"rank 1 issued all_reduce \d+ in group control of \[9\] float64 \(.* at .*\), where "
        rf"{'rank 0' if nproc == '2' else 'ranks 0, 2-3'} issued all_reduce \d+ in group control of "
        r"\[8\] float64 \(.* at .*\)",
        told(screen),
    ), screen


DIE = """
import signal, time
from shoal.data.loader import Loader
read = Loader.batch
def batch(self, step):
    if unwell(step):
        time.sleep(0.5)  # the other rank waits by then
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, step)
Loader.batch = batch
"""


def test_a_rank_that_dies_is_named_and_what_the_others_waited_for(data, tmp_path):
    screen, run, took = verdict_of(data, tmp_path, DIE)
    assert re.match(
        r"rank 1 was killed by signal 9 \(SIGKILL\) in .*step [67].*; rank 0 waits in ", told(screen)
    ), screen
    assert took < HANG_S + 5
    assert list((run / "postmortem").glob("*/rank-1.json"))


@pytest.mark.parametrize("nproc", ["2", pytest.param("4", marks=pytest.mark.proof)])
def test_a_stopped_rank_is_named_and_ended(data, tmp_path, nproc):
    running = Running(data, tmp_path, "--nproc", nproc, *LIMITS, "--train.micro_batch_size", "2")
    running.wait_for_step(5)
    stopped = running.pid(1)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    status, screen = running.end()
    assert status == 1
    assert time.monotonic() - began < HANG_S + 30
    assert re.match(r"rank 1 is stopped by a signal in .*step \d+; rank.* wait", told(screen.splitlines()))
    assert not Path(f"/proc/{stopped}").exists(), "it is still there"


@pytest.mark.proof
def test_after_a_verdict_the_job_starts_again_from_its_checkpoint(data, tmp_path):
    once = SLEEP.replace("unwell(step)", "not os.path.exists('%s') and unwell(step)" % (tmp_path / "began"))
    code = "import os, time\ndef unwell(step):\n    if step == 7 and os.environ.get('RANK') == '1':\n"
    code += f"        open({str(tmp_path / 'began')!r}, 'w').close()\n        return True\n"
    (tmp_path / "sitecustomize.py").write_text(code + once)
    limits = ("--train.steps", "10", "--checkpoint.every", "5", "--runtime.hang_s", str(HANG_S))
    status, screen = shoal(data, tmp_path / "run", "--nproc", "2", *limits, env=commands.planted(tmp_path))
    assert status == 0, screen
    assert "rank 1 is in data of step 7" in screen
    assert "(restart 1 of 3)" in screen
    assert "resumed from step-00000005" in screen


@pytest.mark.proof
def test_without_our_launcher_a_rank_speaks_and_all_end(data, tmp_path):
    fault = "import os, time\ndef unwell(step):\n    return step == 7 and os.environ.get('RANK') == '1'\n"
    (tmp_path / "sitecustomize.py").write_text(fault + SLEEP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    done = subprocess.run(
        [*torchrun, *command(data, tmp_path / "run", *LIMITS[2:])[2:]],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, **commands.planted(tmp_path)},
    )
    assert done.returncode != 0
    everything = done.stderr + "".join(p.read_text() for p in tmp_path.glob("run/ranks/*/log"))
    assert everything.count("rank 1 is in data of step 7, batch at sitecustomize.py") == 1, everything
