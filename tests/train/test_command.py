"""`shoal train` as users meet it: real processes, signals, kills, exit statuses and sentences."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shoal.config.layout import parse_layout
from shoal.config.sections import Config
from shoal.errors import ConfigError
from shoal.train.request import Request
from tests import commands
from tests.cases import every
from tests.launch.processes import alive
from tests.mpirun import mpirun, needs_mpi
from tests.tiny_dataset import random_dataset, with_other_tokenizer
from tests.train.commands import Running, arguments_of, command, same_weights, shoal

WHOLE = ("--nproc", "2", "--train.steps", "120", "--checkpoint.every", "20")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A dataset of 78 steps."""
    return random_dataset(tmp_path_factory.mktemp("data") / "walk", train_tokens=10_000)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An undisturbed run of 120 steps on 2 processes."""
    run = tmp_path_factory.mktemp("whole")
    status, screen = shoal(data, run, *WHOLE, env={"CURVES": ""})
    assert status == 0, screen
    return run, screen


def test_the_first_page_and_the_lines_tell_what_happens(whole):
    run, screen = whole
    for words in (
        "dp2: 2 processes, 1 micro-step of 4 sequences each",
        "8 sequences = 128 tokens",
        "epoch 2 begins in step",
        "step 120: test loss",
    ):
        assert words in screen
    assert re.search(r"step +20/120  loss [\d.]+  lr [\d.e-]+  [\d,]+ tokens/s  \d+:\d\d left\n", screen)
    assert "MFU" not in screen  # a detail
    assert "\r" not in screen
    log = log_of(run)
    for words in ("1 per worker (runtime.threads)", "257, padded to 384; end of document 256",
                  "settings     model.n_layers = 2; ", " ms a step: data ", "MFU", "by rank: "):  # fmt: skip
        assert words in log


def test_the_first_page_warns_of_slow_products_and_says_how_chunks_fall(data, tmp_path):
    status, screen = shoal(
        data, tmp_path / "run", "--train.steps", "1", "--precision.dtype", "fp16", "--model.n_layers", "3",
        "--train.recompute", "full", "--train.recompute_layers", "2",
        "--train.recompute_offload=true", "--runtime.device=cpu",
    )  # fmt: skip
    assert status == 0
    slow = "warning: fp16 matrix products are not in this CPU's hardware: large ones run some 50 times slower"
    assert slow in screen
    chunks = "full, 1 chunk of 2 layers and one of 1: train.recompute_layers does not divide 3 layers"
    assert f"{chunks}, their inputs in host memory" in " ".join(log_of(tmp_path / "run").split())
    assert "train.recompute_offload = true saves nothing on a CPU, whose memory is the host's" in screen


def test_a_run_leaves_its_settings_its_curve_and_every_step(whole):
    run, _ = whole
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "[train]" in (run / "config.toml").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 121))
    assert len(repr(lines[0]["loss"])) > 10
    assert sum("test_loss" in line for line in lines) == 1


@pytest.mark.parametrize("rank", every(2, [1, 0]))
def test_a_killed_rank_costs_a_restart_and_changes_nothing(data, tmp_path, whole, rank):
    running = Running(data, tmp_path, *WHOLE)
    running.wait_for_step(30)
    os.kill(running.pid(rank), signal.SIGKILL)
    status, screen = running.end()
    assert status == 0, screen
    assert f"rank {rank} was killed by signal 9 (SIGKILL)" in screen
    assert "(restart 1 of 3)" in screen
    assert "restart 2" not in screen
    assert same_weights(tmp_path, whole[0])


def test_a_rank_killed_too_often_ends_the_job_and_is_named_last(data, tmp_path):
    words = ("--nproc", "2", "--max-restarts", "1", "--train.steps", "100000", "--checkpoint.every", "20")
    running = Running(data, tmp_path, *words)
    for step in (5, 30):
        running.wait_for_step(step)
        dying, survivor = running.pid(1), running.pid(0)
        os.kill(dying, signal.SIGKILL)
        killed = time.monotonic()
        while alive(survivor):
            assert time.monotonic() - killed < 5, "the survivor is still there"
            time.sleep(0.05)
        if step == 5:
            while running.pid(1) == dying or running.step() >= 30:
                time.sleep(0.05)
    status, screen = running.end()
    assert status == 1
    assert "rank 1 was killed by signal 9 (SIGKILL)" in "".join(screen.splitlines()[-3:])


def test_a_rank_that_waits_for_a_peer_leaves_when_its_launcher_asks_it_to(data, tmp_path):
    """As after the loss of a rank that gloo does not report."""
    running = Running(data, tmp_path, "--nproc", "2", "--max-restarts", "0", "--train.steps", "100000")
    running.wait_for_step(5)
    waiting, stopped = running.pid(0), running.pid(1)
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(waiting, signal.SIGTERM)
    running.wait_for(lambda: not alive(waiting), "end of the rank that waits", 4)
    os.kill(stopped, signal.SIGCONT)
    assert running.end()[0] == 1


@pytest.mark.parametrize(("nproc", "number"), [("1", signal.SIGINT), ("2", signal.SIGTERM)])
def test_a_signal_saves_and_the_same_command_goes_on(data, tmp_path, nproc, number):
    arguments = ("--nproc", nproc, "--train.steps", "100000", "--checkpoint.every", "0")
    running = Running(data, tmp_path, *arguments)
    running.wait_for_step(10)
    running.process.send_signal(number)
    status, screen = running.end()
    assert status == 75, screen
    stopped = int(re.search(r"stopped after step (\d+) by SIG\w+; all is saved", screen)[1])
    assert stopped >= 10
    status, screen = shoal(data, tmp_path, *arguments, "--stop-after", str(stopped + 3))
    assert status == 75
    assert f"resumed from step-{stopped:08}" in screen
    assert f"stopped after step {stopped + 3} by --stop-after" in screen


@pytest.mark.parametrize("nproc", every(2, ["2", "1"]))
def test_a_second_signal_stops_at_once_and_saves_nothing(data, tmp_path, nproc):
    """A step of 400,000 sequences takes long enough for both signals to come inside of it."""
    size = ("--train.global_batch_size", "400000", "--train.micro_batch_size", "40")
    running = Running(data, tmp_path, "--nproc", nproc, *size)
    until = time.monotonic() + 60
    while "  step " not in (log := log_of(tmp_path)) and "  settings " not in log:
        assert time.monotonic() < until, log
        time.sleep(0.1)
    time.sleep(1)
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    running.process.send_signal(signal.SIGINT)
    status, _ = running.end(timeout=10)
    assert status == 130
    assert not list(tmp_path.glob("checkpoints/step-*"))


def log_of(run):
    path = run / "ranks/rank-0/log"
    return path.read_text() if path.exists() else ""


def test_the_time_limit_saves_and_exits_75(data, tmp_path):
    status, screen = shoal(data, tmp_path, "--train.steps", "100000", "--max-time", "1")
    assert status == 75
    assert "by the time limit of 1 s; all is saved" in screen


def test_a_stop_inside_validation_is_honoured_and_the_validation_made_up_for(data, tmp_path):
    arguments = ("--eval.every", "5", "--eval.batch_size", "1", "--eval.sequences", "180")
    arguments += ("--train.steps", "5", "--model.n_layers", "12", "--model.d_model", "128")
    running = Running(data, tmp_path, *arguments)
    running.wait_for_step(5)
    running.process.send_signal(signal.SIGTERM)
    status, screen = running.end()
    assert status == 75, screen
    assert "validation loss" not in screen
    status, screen = shoal(data, tmp_path, *arguments)
    assert status == 0
    assert "step 5: validation loss" in screen


def test_the_failing_ranks_own_traceback_comes_last(data, tmp_path):
    """Rank 1 raises an error of its own, of which rank 0 only hears as a lost connection."""
    launcher = (
        "import sys, os\n"
        "from shoal.data.loader import Loader\n"
        "read = Loader.batch\n"
        "def batch(self, step):\n"
        "    if step == 7 and os.environ.get('RANK') == '1': raise ValueError('rank one is unwell')\n"
        "    return read(self, step)\n"
        "Loader.batch = batch\n"
    )
    (tmp_path / "sitecustomize.py").write_text(launcher)
    words = ("--nproc", "2", "--max-restarts", "0")
    status, screen = shoal(data, tmp_path / "run", *words, env=commands.planted(tmp_path))
    assert status == 1
    *tail, sentence, hint = screen.splitlines()
    assert sentence == "rank 1: ValueError: rank one is unwell"
    assert hint.startswith("  hint: stacks and last operations: ")
    assert any("in batch" in line for line in tail[-7:])


def test_workers_leave_when_their_launcher_is_killed(data, tmp_path):
    running = Running(data, tmp_path, "--nproc", "2", "--train.steps", "100000")
    running.wait_for_step(5)
    workers = [running.pid(0), running.pid(1)]
    running.process.kill()
    running.end()
    until = time.monotonic() + 5
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < until, "orphans are still there"
        time.sleep(0.1)


def test_torchrun_starts_the_same_command(data, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    torchrun += ["-m", "shoal"]
    arguments = command(data, tmp_path, "--train.steps", "6")[3:]
    done = subprocess.run(torchrun + arguments, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "dp2: 2 processes" in done.stdout


def test_layout_words_set_the_axes_and_the_number_of_processes(data, tmp_path):
    status, screen = shoal(data, tmp_path, "--layout", "zero2x2", "--train.steps", "2")
    assert status == 0, screen
    assert "zero2x2: 2 processes" in screen
    stored = (tmp_path / "config.toml").read_text()
    assert "zero = 2" in stored
    assert "dp_shard = 2" in stored


def test_a_launcher_must_start_as_many_ranks_as_the_layout_has():
    with pytest.raises(ConfigError, match=r"--layout tp4 is for 4 processes, not for 2"):
        Request(Config(), Path(), layout=parse_layout("tp4")).check(2)


def test_ranks_that_a_launcher_started_do_not_launch_again(data, tmp_path):
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29732"}
    status, screen = shoal(data, tmp_path, "--nproc", "2", env=env)
    assert status == 2
    assert "--nproc 2: torchrun or srun has started the ranks already" in screen


@pytest.mark.parametrize("strategy", ["diloco", "async_sgd"])
def test_replicas_that_train_apart_are_not_started_as_one_world(data, tmp_path, strategy):
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29732"}
    every = ("--sync.every", "2") if strategy == "diloco" else ()
    status, screen = shoal(data, tmp_path, "--sync.strategy", strategy, *every, env=env)
    assert status == 2
    assert f"sync.strategy = {strategy} under dp2: each replica is a world of its own, and these 2" in screen
    assert not (tmp_path / "ranks").exists()  # refused before it waits for the other rank


@pytest.mark.proof
def test_the_time_limit_counts_over_restarts(data, tmp_path):
    limit_s = 20.0
    running = Running(data, tmp_path, "--nproc", "2", "--train.steps", "100000", "--max-time", f"{limit_s}")
    running.wait_for_step(5)
    first = running.pid(1)
    time.sleep(6)
    os.kill(first, signal.SIGKILL)
    running.wait_for(lambda: running.pid(1) != first, "restart")
    again = time.monotonic()
    status, screen = running.end()
    assert status == 75, screen
    assert "the time limit of 20 s" in screen
    assert time.monotonic() - again < limit_s - 2, "it counts from the restart"


def test_slurm_variables_start_a_rank_each(data, tmp_path):
    ranks = []
    for rank in range(2):
        slurm = {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(rank),
        }
        slurm |= {"SLURM_TASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
        ranks.append(commands.Command(*arguments_of(data, tmp_path, "--train.steps", "6"), env=slurm))
    ended = [rank.end(timeout=90) for rank in ranks]
    assert [done.returncode for done in ended] == [0, 0], ended
    assert "dp2: 2 processes" in ended[0].stdout


@needs_mpi
@pytest.mark.proof
def test_mpirun_starts_a_rank_each(data, tmp_path):
    batch = ("--train.micro_batch_size", "2")
    done = mpirun(4, *command(data, tmp_path, "--train.steps", "6", *batch)[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dp4: 4 processes" in done.stdout + done.stderr


def test_a_port_in_use_is_said(data, tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        status, screen = shoal(data, tmp_path, env=env)
    assert status == 2
    assert f"error: port {port} on 127.0.0.1 is in use by another program" in screen
    assert "hint: choose another MASTER_PORT" in screen


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere"], "there is no dataset folder"),
        (["--model.n_heads", "5"], "model.d_model = 32 is not divisible by model.n_heads = 5"),
        (["--train.seq_len", "17"], "train.seq_len = 17 is longer than model.max_seq_len = 16 positions"),
        (
            ["--train.global_batch_size", "9"],
            "train.micro_batch_size = 4 does not divide a rank's share of 9",
        ),
        (["--nproc", "3"], "train.global_batch_size = 8 does not divide among 3 data-parallel ranks"),
        (["--layout", "pp2*quick"], "'quick' in layout 'pp2*quick' is no layout word"),
        (["--layout", "tp2", "--nproc", "4"], "--layout tp2 is for 2 processes, not for 4"),
        (
            ["--layout", "tp2", "--parallel.tp", "4"],
            "--layout tp2 sets parallel.tp, and so does --parallel.tp",
        ),
        (["--init", "nowhere"], "--init nowhere does not exist"),
        (["--runtime.device", "cuda"], "torch sees no CUDA device here"),
        (["--runtime.device", "cuda", "--nproc", "2"], "torch sees no CUDA device here"),
        (["--model.n_layrs", "5"], "Did you mean --model.n-layers?"),
    ],
)
def test_bad_input_gets_a_sentence_and_status_2(data, tmp_path, arguments, words):
    if arguments[0] == "--runtime.device" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    if arguments[0] == "--data":
        data, arguments = arguments[1], []
    done = commands.run(*arguments_of(data, tmp_path / "run", *arguments))
    assert done.returncode == 2
    assert words in re.sub(r"[\s│]+", " ", done.stdout + done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()  # nothing is left behind


def test_a_folder_that_cannot_be_written_is_said(data, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    status, screen = shoal(data, blocked / "run")
    assert status in (1, 2)
    assert f"{blocked / 'run'} cannot be written" in screen


def test_more_workers_than_cores_are_warned_about(data, tmp_path):
    cores = os.cpu_count()
    if cores > 4:
        pytest.skip("this would start many processes")
    nproc, micro = (
        (4, ("--train.micro_batch_size", "2")) if cores < 4 else (8, ("--train.micro_batch_size", "1"))
    )
    status, screen = shoal(data, tmp_path, "--nproc", str(nproc), "--train.steps", "2", *micro)
    assert status == 0, screen
    assert f"warning: --nproc {nproc} is above the {cores} cores" in screen


def test_another_tokenizer_is_refused_by_name_and_allowed_by_name(data, tmp_path):
    other = with_other_tokenizer(random_dataset(tmp_path / "other"))
    asked = [*arguments_of(data, tmp_path / "run", "--train.steps", "1"), "--data", str(other)]
    done = commands.run(*asked)
    assert done.returncode == 2, done.stdout
    assert "other/tokenizer.json is another tokenizer than" in done.stderr
    assert "--allow-tokenizer-mismatch" in done.stderr
    done = commands.run(*asked, "--allow-tokenizer-mismatch")
    assert done.returncode == 0, done.stderr
    assert "other/tokenizer.json is another tokenizer than" in done.stdout + done.stderr


def test_a_resume_says_where_a_changed_learning_rate_ends(data, tmp_path):
    asked = arguments_of(data, tmp_path / "run", "--train.steps", "2", "--optimizer.lr", "0.002")
    (tmp_path / "own.toml").write_text("")  # a preset says where it ends
    asked[1] = str(tmp_path / "own.toml")
    assert commands.run(*asked, "--stop-after", "1", "--schedule.min_lr", "0.0").returncode == 75
    done = commands.run(*asked)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "schedule.min_lr = None (was 0.0): the learning rate ends at 0.0002" in said


@pytest.mark.parametrize("mode", ["once", "full"])
def test_damaged_data_ends_all_ranks_with_its_name(tmp_path, mode):
    data = random_dataset(tmp_path / "data")
    content = bytearray((data / "validation.bin").read_bytes())
    content[1000] ^= 1  # in a split that is read late
    (data / "validation.bin").write_bytes(content)
    status, said = shoal(data, tmp_path / "run", "--train.steps", "3", "--nproc", "2", "--data.verify", mode)
    assert status == 2, said
    assert "validation.bin changed since it was prepared" in said
    if mode == "full":  # no step was taken: nothing is left
        assert not (tmp_path / "run").exists()
    else:
        assert "once: 6 files" in log_of(tmp_path / "run")
    status, said = shoal(data, tmp_path / "off", "--train.steps", "3", "--data.verify", "off")
    assert status == 0, said
