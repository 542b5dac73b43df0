"""`shoal train` on a terminal: nothing is wider than it, and a progress line lives below the messages."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.terminal import Terminal, drawn, left_over, width
from tests.train.commands import SMALL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks commands with a screen of their own")
SAMPLING = ("--eval.every", "50", "--eval.prompt", "Once", "--checkpoint.every", "50")


def train(folder, data, columns, *arguments, strike):
    """Run on a terminal to the end, and call `strike(run)` at step 60; return status and what was written."""
    (folder / "my-text").symlink_to(data)
    run, terminal, until = folder / "runs/first", Terminal(columns), time.monotonic() + 40
    options = dict(zip(SMALL[::2], SMALL[1::2], strict=True))
    given = [word for option in options.items() if option[0] not in arguments for word in option]
    names = ("--data", "my-text", "--run-dir", "runs/first", "--nproc", "2")
    command = terminal.start(folder, "train", "tiny", *names, *given, *arguments)
    try:
        while not (
            (run / "checkpoints/step-00000050").exists()
            and '"step": 60,' in (run / "metrics.jsonl").read_text()
        ):
            assert time.monotonic() < until, terminal.raw()
            time.sleep(0.02)
        strike(run)
        status = command.end(60).returncode
    finally:
        command.kill()
        terminal.close()
    return status, terminal.raw()


def kill_rank_1(run):
    os.kill(int((run / "ranks/rank-1/pid").read_text()), signal.SIGKILL)


def interrupt_launcher(run):
    worker = (run / "ranks/rank-0/pid").read_text()
    launcher = re.search(r"PPid:\t(\d+)", Path(f"/proc/{worker}/status").read_text())[1]
    os.kill(int(launcher), signal.SIGINT)


def test_a_run_of_two_processes_with_a_restart_fits_80_columns(data, tmp_path):
    arguments = ("--train.steps", "200", *SAMPLING)
    status, raw = train(tmp_path, data, 80, *arguments, strike=kill_rank_1)
    assert status == 0, raw
    pieces, lines = drawn(raw), left_over(raw)
    wide = [piece.strip() for piece in pieces if width(piece) > 80]
    assert [piece for piece in wide if not Path(piece).exists()] == []  # a long path has a line of its own
    first_step = next(number for number, line in enumerate(lines) if line.startswith("step"))
    assert 8 <= len(lines[:first_step]) <= 12
    for shown in (
        "  run          runs/first",
        "  data         my-text",
        "restarting all ranks from the last committed checkpoint (restart 1 of 3)",
        "done: runs/first (curve: loss.png)",
    ):
        assert shown in lines
    assert any(re.fullmatch(r"resumed from step-\d{8} \(restart 1\)", line) for line in lines)
    number = lines.index("step 50: sample")
    assert lines[number + 1].startswith("  Once")
    progress = [piece for piece in pieces if "━" in piece]
    assert len({re.match(r"step (\d+)/200  \d+:\d\d left  ━+$", piece)[1] for piece in progress}) > 3
    assert not any("━" in line for line in lines)  # it is gone when the next message comes
    log = (tmp_path / "runs/first/ranks/rank-0/log").read_text()
    assert "━" not in log
    assert "\x1b" not in log


def test_with_verbose_it_fits_120_columns_and_ends_on_ctrl_c(data, tmp_path):
    arguments = ("--train.steps", "100000", "--verbose", "--train.log_every", "5", *SAMPLING)
    status, raw = train(tmp_path, data, 120, *arguments, strike=interrupt_launcher)
    assert status == 75, raw
    assert [piece for piece in drawn(raw) if width(piece) > 120] == []
    lines = left_over(raw)
    for words in (
        "  settings     model.n_layers = 2; ",
        "  threads      1 per worker",
        "  gradient norm ",
        "  by rank: peak ",
        "SIGINT: saving at the end of this step",
        "stopped after step",
    ):
        assert any(line.startswith(words) for line in lines), words
    assert not any("━" in line for line in lines)
