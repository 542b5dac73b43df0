"""`shoal quickstart`: from text to a writing model, with a killed worker in between, offline."""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal import scoring
from shoal.data.dataset import open_dataset
from shoal.data.loader import Windows
from shoal.errors import InputError, ShoalError
from shoal.infer.load import TextModel, load_text_model
from shoal.models.decoder import Decoder
from shoal.runtime.log import rank_folder
from shoal.train.metrics import read_metrics

_PRESET = "quickstart"
_VOCAB_SIZE = 2048
_STEPS = 240
_TEST_WINDOWS = 256
_PROMPT = "def main("
_POLL_S = 0.05


def quickstart(output: Path) -> None:
    """Prepare, train with a kill half-way, train again without, compare, test and generate."""
    began = time.monotonic()
    data, killed, whole = output / "data", output / "runs" / "killed", output / "runs" / "whole"
    for run in (killed, whole):
        if run.exists() and not (run / "config.toml").is_file():
            raise InputError(f"{run} is not a run of Shoal's", hint="choose another --output")
        shutil.rmtree(run, ignore_errors=True)
    _say("1. Prepare the source text of Python's standard library: a tokenizer and a dataset")
    _shoal("prepare", "stdlib", "--output", str(data), "--vocab-size", str(_VOCAB_SIZE), "--split", "90,5,5")
    _say(f"2. Train on 2 processes; rank 1 gets SIGKILL at step {_STEPS // 2}")
    struck = threading.Event()
    assassin = threading.Thread(target=_kill_rank, args=(killed, 1, _STEPS // 2, struck), daemon=True)
    assassin.start()
    _train(data, killed)
    if not struck.is_set():
        raise ShoalError(
            "the run ended before its rank could be killed, so nothing was shown", hint="try again"
        )
    _say("3. The same job again, this time undisturbed")
    _train(data, whole)
    models = [load_text_model(run, torch.device("cpu")) for run in (killed, whole)]
    digests = [weights_digest(model.model) for model in models]
    _say("4. Compare, test and write")
    print(f"weights of the killed run       sha256 {digests[0]}")
    print(f"weights of the undisturbed run  sha256 {digests[1]}")
    if digests[0] != digests[1]:
        raise ShoalError(
            "the digests differ: the recovered run is not the undisturbed one", hint="report this"
        )
    print("equal: the kill cost time and nothing else")
    result = bits_per_byte(models[0], data)
    print(
        f"test text: {result.model:.2f} bits per byte by the model, {result.zlib:.2f} by zlib -9 "
        f"(on the same {result.num_bytes:,} bytes of source text that no training saw)"
    )
    print(f"\nThe model writes, after {_PROMPT!r}:\n")
    _shoal(
        "generate",
        str(killed),
        "--prompt",
        _PROMPT,
        "--max-tokens",
        "100",
        "--temperature",
        "0.8",
        "--seed",
        "1",
    )
    print(f"\n\nloss curve  {killed / 'loss.png'}\nrun folder  {killed}")
    print(f"{time.monotonic() - began:.0f} s in all")


def weights_digest(model: Decoder) -> str:
    """Hash names and bytes of all weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(weight.detach().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class BitsPerByte:
    """How many bits a byte of the same text costs under two models of it."""

    model: float
    zlib: float
    num_bytes: int


@torch.no_grad()
def bits_per_byte(text_model: TextModel, data: Path) -> BitsPerByte:
    """Score the first windows of the test split and compress the very text of their targets with zlib."""
    split = open_dataset(data).split("test")
    assert split is not None, "the dataset has no test split"
    seq_len = text_model.model.shape.max_seq_len
    windows = Windows([split], seq_len)
    tokens_bt = torch.from_numpy(windows.read(np.arange(min(_TEST_WINDOWS, windows.total))))
    nats = sum(
        scoring.loss_sum(text_model.model(part[:, :-1]), part[:, 1:]).item() for part in tokens_bt.split(8)
    )
    text = text_model.tokenizer.decode(tokens_bt[:, 1:].flatten().tolist()).encode()
    return BitsPerByte(nats / math.log(2) / len(text), 8 * len(zlib.compress(text, 9)) / len(text), len(text))


def _train(data: Path, run: Path) -> None:
    arguments = ("train", _PRESET, "--data", str(data), "--run-dir", str(run), "--nproc", "2")
    _shoal(*arguments, "--train.steps", str(_STEPS))


def _shoal(*arguments: str) -> None:
    """Run a command as the user would, and show it."""
    print(f"$ {shlex.join(('shoal', *arguments))}", flush=True)
    status = subprocess.run([sys.executable, "-m", "shoal", *arguments], check=False).returncode
    if status:
        raise ShoalError(f"`shoal {arguments[0]}` ended with status {status}")


def _kill_rank(run: Path, rank: int, step: int, struck: threading.Event) -> None:
    """Send SIGKILL to a rank once the run has done `step` steps."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or max((line["step"] for line in read_metrics(metrics)), default=0) < step:
        time.sleep(_POLL_S)
    process = int((rank_folder(run, rank) / "pid").read_text())
    print(f"\n*** quickstart: kill -9 {process} (rank {rank}) after step {step}", flush=True)
    os.kill(process, signal.SIGKILL)
    struck.set()


def _say(text: str) -> None:
    print(f"\n=== {text}", flush=True)
