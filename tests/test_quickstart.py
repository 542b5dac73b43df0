"""The figures that the demonstration prints; `make proof` runs the whole of it."""

import json
import math
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal import quickstart as demonstration
from shoal.data.dataset import open_dataset
from shoal.errors import EXIT_DONE, EXIT_STOPPED, InputError, ShoalError
from shoal.infer.load import load_text_model
from shoal.quickstart import bits_per_byte, quickstart, weights_digest
from shoal.runtime.log import rank_folder
from tests.tiny_dataset import write_dataset
from tests.train.ranks import run_training, tiny_config

LETTERS = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 100, dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    splits = {"train": [LETTERS], "validation": [LETTERS[:500]], "test": [LETTERS[:1000]]}
    data = write_dataset(folder / "data", splits)
    pool.run(run_training, 1, folder / "run", tiny_config(data))
    return folder


@pytest.fixture
def trained(folder):
    return load_text_model(folder / "run", torch.device("cpu")), folder / "data"


def test_bits_per_byte_are_those_of_the_same_text(trained):
    model, data = trained
    found = bits_per_byte(model, data)
    tokens = torch.from_numpy(open_dataset(data).split("test").tokens.astype(np.int64))
    windows = (len(tokens) - 1) // 16
    text = bytes(tokens[1 : 1 + 16 * windows].tolist())
    assert found.num_bytes == len(text)
    assert found.zlib == pytest.approx(8 * len(zlib.compress(text, 9)) / len(text))
    inputs = tokens[: 16 * windows].view(windows, 16)
    targets = tokens[1 : 1 + 16 * windows].view(windows, 16)
    with torch.no_grad():
        logits = model.model(inputs).double()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert found.model == pytest.approx(float(nats) / math.log(2) / len(text), rel=1e-5)


def test_the_digest_sees_a_single_bit(trained):
    model, _ = trained
    before = weights_digest(model.model)
    assert weights_digest(model.model) == before
    weight = model.model.norm.bias
    with torch.no_grad():
        weight.view(torch.int32)[0] ^= 1
    assert weights_digest(model.model) != before


def test_a_folder_that_is_no_run_of_ours_is_left_alone(tmp_path):
    precious = tmp_path / "runs/gpt/precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(InputError, match="is not a run of Shoal's"):
        quickstart(tmp_path)
    assert precious.read_text() == "mine"


@pytest.fixture
def commands(folder, tmp_path, monkeypatch):
    """Put a trained run in the place of each run of the demonstration; record its commands."""
    recorded = []

    def run(command, check):
        words = command[3:]
        recorded.append(words)
        if words[0] == "prepare":
            shutil.copytree(folder / "data", words[words.index("--output") + 1])
        if words[0] == "train":
            target = words[words.index("--run-dir") + 1]
            shutil.copytree(folder / "run", target, dirs_exist_ok=True)
        return subprocess.CompletedProcess(command, EXIT_STOPPED if "--stop-after" in words else EXIT_DONE)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demonstration.subprocess, "run", run)
    monkeypatch.setattr(demonstration, "_kill_rank", lambda run, rank, step, struck: struck.set())
    return recorded


def test_both_runs_stop_after_the_kill_and_one_goes_on_to_the_end(commands, capsys):
    quickstart(Path("quickstart"))
    assert [words[0] for words in commands] == ["prepare", "train", "train", "train", "generate"]
    killed, undisturbed, rest = commands[1:4]
    assert killed[killed.index("--stop-after") + 1] == undisturbed[undisturbed.index("--stop-after") + 1]
    assert killed[: killed.index("--stop-after")] == rest
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 80
    assert "The digests are equal" in screen
    assert "by zlib -9: smaller" in screen or "by zlib -9: NOT smaller" in screen
    command = screen.partition("$ shoal train ")[2].partition("\n\n")[0].replace("\\\n", "").split("\n")[0]
    assert command.split() == killed[1:]


def test_weights_that_differ_and_a_kill_that_missed_are_errors(commands, monkeypatch):
    digests = iter("ab")
    monkeypatch.setattr(demonstration, "weights_digest", lambda model: next(digests))
    with pytest.raises(ShoalError, match="digests differ"):
        quickstart(Path("quickstart"))
    monkeypatch.setattr(demonstration, "_kill_rank", lambda run, rank, step, struck: None)
    shutil.rmtree("quickstart")
    with pytest.raises(ShoalError, match="before its rank could be killed"):
        quickstart(Path("quickstart"))


def test_a_command_that_fails_ends_the_demonstration(commands, monkeypatch):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(demonstration.subprocess, "run", lambda command, check: failed)
    with pytest.raises(ShoalError, match="`shoal prepare` ended with status 1"):
        quickstart(Path("quickstart"))


def test_the_rank_is_killed_once_its_step_is_done(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pid = rank_folder(tmp_path, 1) / "pid"
        pid.parent.mkdir(parents=True)
        pid.write_text(str(process.pid))
        metrics, struck = tmp_path / "metrics.jsonl", threading.Event()
        metrics.write_text(json.dumps({"step": 2}) + "\n")
        thread = threading.Thread(target=demonstration._kill_rank, args=(tmp_path, 1, 3, struck), daemon=True)
        thread.start()
        assert not struck.wait(0.2)
        with metrics.open("a") as file:
            file.write(json.dumps({"step": 3}) + "\n")
        thread.join(10)
        assert struck.is_set()
        assert process.wait(10) == -signal.SIGKILL
