"""`shoal quickstart`: train a model from text, offline, with a killed process on the way."""

from __future__ import annotations

import hashlib
import math
import os
import re
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
from shoal.errors import EXIT_DONE, EXIT_STOPPED, InputError, ShoalError
from shoal.infer.load import TextModel, load_text_model
from shoal.models.decoder import Decoder
from shoal.runtime.device import bf16_is_native
from shoal.runtime.log import rank_folder
from shoal.train.metrics import read_metrics

_PRESET = "quickstart"
_VOCAB_SIZE = 4096
_KILL_STEP, _COMPARE_STEP = 40, 50
_TEST_TOKENS = 28_160  # some 100 KB of text
_PROMPT = "def main("
_POLL_S = 0.05
_WIDTH = 80


def quickstart(output: Path) -> None:
    """Prepare, train past a kill, compare with an undisturbed run, train to the end, test and generate."""
    began = time.monotonic()
    data, killed, undisturbed = output / "data", output / "runs" / "gpt", output / "runs" / "undisturbed"
    for run in (killed, undisturbed):
        if run.exists() and not (run / "config.toml").is_file():
            raise InputError(f"{run} is not a run of Shoal's", hint="choose another --output")
        shutil.rmtree(run, ignore_errors=True)
    if not bf16_is_native(torch.device("cpu")):
        print("This CPU has no bf16 units and trains in fp32: expect five minutes, not three.")
    _say(
        "1/5 Prepare a dataset",
        "Train a tokenizer on the source text of Python's standard library; tokenise it.",
    )
    _shoal("prepare", "stdlib", "--output", str(data), "--vocab-size", str(_VOCAB_SIZE), "--split", "90,5,5")
    _say(
        f"2/5 Train a GPT on two processes to step {_COMPARE_STEP}, and kill one on the way",
        f"Rank 1 gets SIGKILL after step {_KILL_STEP}. The launcher then restarts both processes\n"
        "from the last checkpoint.",
    )
    _train_through_a_kill(data, killed)
    _say(
        "3/5 Compare with an undisturbed run",
        f"Train the same {_COMPARE_STEP} steps without a kill: the weights must be equal, bit for bit.",
    )
    _train(data, undisturbed, "--stop-after", str(_COMPARE_STEP))
    _compare(killed, undisturbed)
    _say("4/5 Train to the end", "Resume the run that was killed, with the same command.")
    _train(data, killed)
    _say(
        "5/5 Test and generate",
        "Score held-out text, compress the same text with zlib -9, generate a sample.",
    )
    result = bits_per_byte(load_text_model(killed, torch.device("cpu")), data)
    sampling = ("--max-tokens", "100", "--temperature", "0.8", "--seed", "1")
    _shoal("generate", str(killed), "--prompt", _PROMPT, *sampling)
    print()
    _say(f"Done in {time.monotonic() - began:.0f} s", _summary(result, killed))


def _train_through_a_kill(data: Path, run: Path) -> None:
    struck = threading.Event()
    assassin = threading.Thread(target=_kill_rank, args=(run, 1, _KILL_STEP, struck), daemon=True)
    assassin.start()
    _train(data, run, "--stop-after", str(_COMPARE_STEP))
    if not struck.is_set():
        raise ShoalError(
            "the run ended before its rank could be killed, so nothing was shown", hint="try again"
        )


def _compare(killed: Path, undisturbed: Path) -> None:
    """Print the digests of both runs' weights; ShoalError if they differ."""
    runs = {"killed": killed, "undisturbed": undisturbed}
    digests = {
        name: weights_digest(load_text_model(run, torch.device("cpu")).model) for name, run in runs.items()
    }
    print(f"\nSHA-256 of all weights after step {_COMPARE_STEP}, by run:")
    for name, digest in digests.items():
        print(f"  {digest}  {name}")
    if digests["killed"] != digests["undisturbed"]:
        raise ShoalError(
            "the digests differ: the recovered run is not the undisturbed one", hint="report this"
        )
    print("The digests are equal: the recovered run has the same weights, bit for bit.")


def _summary(result: BitsPerByte, run: Path) -> str:
    verdict = "smaller" if result.model < result.zlib else "NOT smaller"
    data, own = "datasets/mine", "runs/mine"
    commands = [
        ("shoal", "prepare", "MY_TEXTS", "--output", data, "--vocab-size", str(_VOCAB_SIZE)),
        ("shoal", "train", _PRESET, "--data", data, "--run-dir", own, "--nproc", "2"),
        ("shoal", "generate", own, "--prompt", "Once upon a time"),
    ]
    if not shutil.which("shoal"):
        commands.insert(0, ("source", f"{sys.prefix}/bin/activate"))
    lines = [
        "recovery    weights equal to those of an undisturbed run, bit for bit",
        f"test text   {result.model:.2f} bits per byte by the model, {result.zlib:.2f} by zlib -9: {verdict}",
        f"            (the same {result.num_bytes:,} bytes, which were not trained on)",
        f"loss curve  {run / 'loss.png'}",
        f"run folder  {run}",
        "\nNext, train on your own text: files, folders or globs in place of MY_TEXTS\n",
        *(_wrapped(*command) for command in commands),
    ]
    return "\n".join(lines)


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
    wanted = min(_TEST_TOKENS // seq_len, windows.total)
    tokens_bt = torch.from_numpy(windows.read(np.arange(wanted)))
    nats = sum(
        scoring.loss_sum(text_model.model(part[:, :-1]), part[:, 1:]).item() for part in tokens_bt.split(8)
    )
    text = text_model.tokenizer.decode(tokens_bt[:, 1:].flatten().tolist()).encode()
    return BitsPerByte(nats / math.log(2) / len(text), 8 * len(zlib.compress(text, 9)) / len(text), len(text))


def _train(data: Path, run: Path, *arguments: str) -> None:
    _shoal("train", _PRESET, "--data", str(data), "--run-dir", str(run), "--nproc", "2", *arguments)


def _shoal(*arguments: str) -> None:
    """Run a command as the user would, and show it; --stop-after ends it with EXIT_STOPPED."""
    print(_wrapped("shoal", *arguments), flush=True)
    status = subprocess.run([sys.executable, "-m", "shoal", *arguments], check=False).returncode
    if status != (EXIT_STOPPED if "--stop-after" in arguments else EXIT_DONE):
        raise ShoalError(f"`shoal {arguments[0]}` ended with status {status}")


def _wrapped(*words: str) -> str:
    """Return a command as for a shell, continued on further lines where it is wider than the screen."""
    lines = ["$"]
    for part in re.split(r" (?=--)", shlex.join(words)):  # an option stays beside its value
        if len(lines[-1]) + len(part) + len("  \\") > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines)


def _kill_rank(run: Path, rank: int, step: int, struck: threading.Event) -> None:
    """Send SIGKILL to a rank once the run has done `step` steps."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or max((line["step"] for line in read_metrics(metrics)), default=0) < step:
        time.sleep(_POLL_S)
    process = int((rank_folder(run, rank) / "pid").read_text())
    print(f"\n*** quickstart: kill -9 {process} (rank {rank}) after step {step}", flush=True)
    os.kill(process, signal.SIGKILL)
    struck.set()


def _say(title: str, text: str) -> None:
    print(f"\n=== {title}\n{text}\n", flush=True)
