"""`shoal train` as a user runs it, with a tiny model; what it says and leaves."""

from __future__ import annotations

import re
import sys
import time
from typing import ClassVar

import numpy as np
import torch

from shoal.infer.load import load_text_model
from tests import commands

SMALL = [
    *("--model.n_layers", "2", "--model.d_model", "32", "--model.n_heads", "2", "--model.max_seq_len", "16"),
    *("--train.global_batch_size", "8", "--train.micro_batch_size", "4", "--train.seq_len", "16"),
    *("--precision.dtype", "fp32", "--eval.every", "0", "--eval.sequences", "4", "--runtime.threads", "1"),
    *("--schedule.warmup_steps", "0", "--train.log_every", "5"),
]


def arguments_of(data, run, *arguments):
    """Return the words after `shoal`; `arguments` replace options of SMALL of the same name."""
    options = dict(zip(SMALL[::2], SMALL[1::2], strict=True))
    options.update(zip(arguments[::2], arguments[1::2], strict=True))
    flat = [word for option in options.items() for word in option]
    return ["train", "tiny", "--data", str(data), "--run-dir", str(run), *flat]


def command(data, run, *arguments):
    """Return the command line for another launcher, or another host."""
    return [sys.executable, "-m", "shoal", *arguments_of(data, run, *arguments)]


def shoal(data, run, *arguments, env=None, timeout=90):
    """Run to the end; return (exit status, what is on the screen, then the errors)."""
    done = commands.run(*arguments_of(data, run, *arguments), env=env, timeout=timeout)
    return done.returncode, done.stdout + done.stderr


class Running:
    """A command in the background, until its test ends."""

    those_of_the_test: ClassVar[list[Running]] = []

    def __init__(self, data, run, *arguments):
        self.run = run
        self.those_of_the_test.append(self)
        self.process = commands.Command(*arguments_of(data, run, *arguments))

    def wait_for_step(self, step, timeout=60):
        self.wait_for(lambda: self.step() >= step, f"step {step}", timeout)

    def wait_for(self, happened, what, timeout=60):
        until = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < until, f"no {what} in time"
            assert self.process.poll() is None, self.process.said()
            time.sleep(0.02)

    def step(self):
        metrics = self.run / "metrics.jsonl"
        found = re.findall(r'"step": (\d+), "tokens"', metrics.read_text()) if metrics.exists() else []
        return int(found[-1]) if found else 0

    def pid(self, rank):
        return int((self.run / f"ranks/rank-{rank}/pid").read_text())

    def end(self, timeout=60):
        done = self.process.end(timeout)
        return done.returncode, done.stdout + done.stderr


def weights(run):
    return {
        n: p.detach().numpy() for n, p in load_text_model(run, torch.device("cpu")).model.named_parameters()
    }


def same_weights(left, right):
    left, right = weights(left), weights(right)
    assert left.keys() == right.keys()
    return all(np.array_equal(left[name], right[name]) for name in left)
