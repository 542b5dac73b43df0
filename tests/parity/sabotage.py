"""What a rank does in place of an honest trial: it leaves out one all-reduce, fails, dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

from shoal.config.layout import resolve_layout
from shoal.gradsync.after_backward import SumAfterBackward
from shoal.parallel.tensor import Axis
from shoal.parity.trial import run_trial


def broken(layout):
    """Leave out one sum of step 1 on all ranks. The model has two layers."""
    if layout == "dp2":  # the one bucket of gradients
        return without_call(dist, "all_reduce", 1, is_fp32, instead=Mock())
    if layout == "tp2":  # what enters the last MLP, backward: after five forward and the head's
        return without_call(Axis, "all_reduce", 7)
    if layout == "tp2+sp":  # what leaves the last attention, forward: after the embedding and a block
        return without_call(Axis, "reduce_scatter", 4, instead=lambda axis, parts: parts[axis.rank].clone())
    if layout == "pp2":  # of the embedding that first and last stage share
        return patch.object(SumAfterBackward, "run", lambda self: None)
    return nullcontext()


def without_call(place, name, number, counts=lambda *_, **__: True, instead=lambda *given, **_: given[-1]):
    """Patch a function so that its `number`-th call, of those that count, returns something else."""
    honest, calls = getattr(place, name), 0

    def leaky(*arguments, **options):
        nonlocal calls
        calls += (counted := counts(*arguments, **options))
        if counted and calls == number:
            return instead(*arguments, **options)
        return honest(*arguments, **options)

    return patch.object(place, name, leaky)


def is_fp32(tensor, **_):
    return tensor.dtype == torch.float32


def break_one_all_reduce(process, tell, trial):
    with broken(str(resolve_layout(trial.config.parallel, process.world_size))):
        return run_trial(process, tell, trial)


def fail(process, tell):
    tell("a rehearsal")
    if process.rank == 1:
        raise ValueError("a broken rank")
    process.sum(1.0)


def die(process, tell):
    tell("a rehearsal")
    if process.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    process.sum(1.0)


def hang(process, tell):
    tell("a rehearsal")
    if process.rank == 1:
        time.sleep(60)
    process.sum(1.0)
    return process.rank


def add_up(process, tell, value):
    tell("adding")
    return process.sum(value + process.rank)[0]
