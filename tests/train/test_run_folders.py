"""Any file of a run folder in any state: the run goes on as it would have, or a sentence names the file."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from shoal.train.metrics import read_metrics
from tests import commands
from tests.train.ranks import run_training, tiny_config
from tests.train.run_folders import FAULTS, cases, check_case, run_cases

SETTINGS = [
    "--model.n-layers=1",
    "--model.d-model=32",
    "--train.steps=6",
    "--train.seq-len=16",
    "--train.global-batch-size=8",
    "--checkpoint.every=2",
    "--runtime.threads=1",
    "--precision.dtype=fp32",
]
STRIDE = 7  # no divisor of the number of faults: every file of the newest step, every fault


def test_a_run_goes_on_with_the_same_weights_or_says_which_file(pool, data, tmp_path):
    values = tiny_config(data, train={"steps": 6}, checkpoint={"every": 2})
    assert len(FAULTS) % STRIDE
    assert pool.run(run_cases, 1, tmp_path, values, 0, STRIDE, timeout=280)[0] == []


@pytest.mark.proof
@pytest.mark.parametrize("shift", range(1, STRIDE))
def test_all_other_faults_of_all_files(pool, data, tmp_path, shift):
    values = tiny_config(data, train={"steps": 6}, checkpoint={"every": 2})
    assert pool.run(run_cases, 1, tmp_path, values, shift, STRIDE, timeout=280)[0] == []


def bound() -> None:
    """Take from a program that is about to start what lets root read everything."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # DAC_OVERRIDE, DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def train(run: Path, data: Path, *more: str, alone: bool = False) -> subprocess.CompletedProcess[str]:
    words = ["train", "tiny", f"--data={data}", f"--run-dir={run}", *SETTINGS, *more]
    if not alone:
        return commands.run(*words, env={"CURVES": ""}, timeout=250)
    command = [sys.executable, "-m", "shoal", *words]
    return subprocess.run(command, preexec_fn=bound, capture_output=True, text=True, timeout=250, check=False)


def tensors(run: Path) -> dict[str, bytes]:
    """Return the tensors of the last step; the headers of their files come in no fixed order."""
    found = {}
    for path in (run / "checkpoints/step-00000006").glob("*/*.safetensors"):
        found |= {f"{path.parent.name}.{name}": held.tobytes() for name, held in load_file(path).items()}
    return found


@pytest.mark.proof
def test_a_command_as_anybody_is_stopped_by_a_file_without_permission_and_goes_on_with_it(data, tmp_path):
    run = tmp_path / "run"
    assert train(run, data, "--stop-after=4").returncode == 75
    state = run / "checkpoints/step-00000004/state.json"
    state.chmod(0)
    stopped = train(run, data, alone=True)
    assert stopped.returncode == 1, stopped.stderr
    assert f"{state} cannot be read: Permission denied (EACCES)" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    state.chmod(0o644)
    again = train(run, data)
    assert "resumed from step-00000004" in again.stdout, again.stderr


def test_what_stands_in_the_way_is_set_aside_and_training_goes_on(data, tmp_path):
    run = tmp_path / "run"
    for name in ("ranks", "compiled", "postmortem"):
        run.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    for name in ("metrics.jsonl", "config.toml", "incidents.jsonl", "loss.png", "checkpoints/LATEST"):
        (run / name / "mine").mkdir(parents=True)
    done = train(run, data)
    assert done.returncode == 0, done.stderr
    assert f"{run / 'ranks'} is not a folder: moved to ranks.bad" in done.stderr + done.stdout
    assert (run / "ranks.bad").read_text() == "mine"
    assert (run / "config.toml").is_file()
    assert (run / "metrics.jsonl.bad/mine").is_dir()
    assert (run / "checkpoints/LATEST").read_text() == "6\n"


def test_checkpoints_that_is_a_file_is_named_and_kept(data, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("mine")
    done = train(run, data)
    assert done.returncode == 1, done.stderr
    assert f"{run / 'checkpoints'} cannot be read: Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert (run / "checkpoints").read_text() == "mine"


def test_lines_of_the_metrics_that_are_no_records_are_set_aside(pool, data, tmp_path):
    values = tiny_config(data, train={"steps": 6}, checkpoint={"every": 2})
    halted = values | {"runtime": {**values["runtime"], "stop_after": 4}}
    pool.run(run_training, 1, tmp_path, halted)
    bad = [b'{"step": 2, "loss": "\xff"}', b"41", b'{"loss": 3}', b"[" * 100_000, b"9" * 5000, b"null"]
    metrics = tmp_path / "metrics.jsonl"
    good = metrics.read_bytes()
    odd = b'{"step": 1, "loss": "high", "grad_norm": 1, "validation_loss": []}\n'
    odd += b'{"step": 2, "loss": 1, "grad_norm": 1, "tokens": 1e999}\n'
    metrics.write_bytes(b"\n".join(bad) + b"\n\n \r\n" + odd + good + b'{"step": 5, "lo')
    result = pool.run(run_training, 1, tmp_path, values, True)[0]
    assert result["done"]
    assert [step for step in result["steps"] if step > 2] == [3, 4, 5, 6]
    assert (tmp_path / "metrics.jsonl.bad").read_bytes() == b"\n".join(bad) + b"\n"
    assert (tmp_path / "loss.png").is_file()
    assert len(read_metrics(metrics)) == len(metrics.read_bytes().splitlines())


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_commands_go_on_with_the_same_weights_or_say_which_file(data, tmp_path):
    pristine = tmp_path / "pristine"
    assert train(tmp_path / "whole", data).returncode == 0
    expected = tensors(tmp_path / "whole")
    assert expected
    assert train(pristine, data, "--stop-after=4").returncode == 75
    alone = False

    def start(run: Path) -> str:
        done = train(run, data, alone=alone)
        if done.returncode == 0:
            return "" if tensors(run) == expected else "Traceback: other weights"
        return done.stderr if "\nerror: " in f"\n{done.stderr}" else f"Traceback: {done.stderr}"

    told = []
    for number, (name, fault) in enumerate(cases(pristine)[3::STRIDE]):
        alone = fault == "unreadable" and os.geteuid() == 0
        if wrong := check_case(pristine, tmp_path / f"run-{number}", name, fault, start):
            told.append(f"{name} {fault}: {wrong}")
    assert told == []
