"""A short training as one rank of a layout, compared tensor by tensor with what the reference has left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shoal.config.sections import Config
from shoal.runtime.process import Process
from shoal.runtime.stop import Stop
from shoal.tasks.feed import HostBatch
from shoal.train.evaluate import evaluate
from shoal.train.job import Job, build_job
from shoal.train.request import Request
from shoal.train.step import agree, forward_backward, update


@dataclass(frozen=True)
class Trial:
    """What every rank is to do: train for some steps under the layout of `config`."""

    config: Config
    steps: int
    tensors: Path  # the reference's, one file each
    run_dir: Path
    is_reference: bool = False  # write the tensors
    reorder: bool = False  # add up in another order wherever the layout leaves a choice


@dataclass(frozen=True)
class Distance:
    """How far a tensor lies from the reference's of the same name."""

    difference: float  # norm of the difference; infinite where it is no number
    norm: float  # of the reference's
    share: float = 1.0  # of the reference's that is in it: 0.5 where half of the terms of a sum are missing


@dataclass
class TrialResult:
    """What one rank saw."""

    outputs: dict[str, float] = field(default_factory=dict)  # of step 1: module, root of the mean square
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: float | None = None
    # "start", "gradient" of step 1 and "weight" at the end: {name: distance}. "moved": how far the
    # reference's weights went.
    tensors: dict[str, dict[str, Distance]] = field(default_factory=dict)


RunTrial = Callable[[Process, Callable[[str], None], Trial], TrialResult]


def run_trial(process: Process, tell: Callable[[str], None], trial: Trial) -> TrialResult:
    """Train and compare. Collective over the world."""
    with _other_order() if trial.reorder else nullcontext():
        return _train(process, tell, trial)


def _train(process: Process, tell: Callable[[str], None], trial: Trial) -> TrialResult:
    trial.run_dir.mkdir(parents=True, exist_ok=True)
    stop = Stop(process, trial.run_dir, trial.config.runtime, launched=False)
    job = build_job(Request(trial.config, trial.run_dir), process, stop)
    outcome = TrialResult()
    weights = job.model.named_weights()
    if trial.reorder:
        _reverse_micro_batches(job)
    tell("the start")
    _compare(job, trial, outcome, "start", lambda name: weights[name].detach())
    for step in range(1, trial.steps + 1):
        job.clock.begin()
        with _watched(job, outcome) if step == 1 and not job.compilation.on else nullcontext():
            batch = job.task.batch(step)
            total = forward_backward(job, batch)
        if step == 1:
            _compare(job, trial, outcome, "gradient", lambda name: _gradient(job, weights[name]))
        result = agree(job, batch, total)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
        update(job, result)
        tell(f"step {step} of {trial.steps}")
    job.task.close()
    _compare(job, trial, outcome, "weight", lambda name: weights[name].detach())
    if job.validation is not None:
        found = evaluate(job, job.validation)
        outcome.validation = found["loss"] if found else None
    return outcome


def _gradient(job: Job, weight: torch.nn.Parameter) -> Tensor:
    """Return the gradient of the unscaled loss; one that is missing is refused by name later, in `clip`."""
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return gradient / job.precision.scaler.scale


def _compare(
    job: Job, trial: Trial, outcome: TrialResult, kind: str, tensor: Callable[[str], Tensor]
) -> None:
    """Put each tensor of this rank together, one at a time, and measure or keep it. Collective."""
    mesh, model = job.model.mesh, job.model
    owners = kind == "gradient" and model.owners is not None
    keeper = owners or (mesh.dp_rank == 0 and mesh.tp_rank == 0)
    found = outcome.tensors.setdefault(kind, {})
    # A gradient is complete on the rank that updates its weight.
    for name in model.updated_weights() if kind == "gradient" else model.named_weights():
        whole = _whole(tensor(name))
        file = trial.tensors / f"{kind}.{name}.npy"
        if not trial.is_reference:
            found[name] = _distance(whole, torch.from_numpy(np.load(file)))
        elif keeper and name not in model.tied_duplicates:
            np.save(file, whole.numpy())
            found[name] = Distance(0.0, _norm(whole))
            if kind == "weight":
                start = torch.from_numpy(np.load(trial.tensors / f"start.{name}.npy"))
                outcome.tensors.setdefault("moved", {})[name] = Distance(0.0, _norm(whole - start))


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, put together where it is cut. Collective over its mesh."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().cpu()


def _distance(tensor: Tensor, reference: Tensor) -> Distance:
    norm = _norm(reference)
    product = torch.dot(tensor.flatten(), reference.flatten()).item()
    difference = _norm(tensor - reference)
    share = product / norm**2 if norm else 1.0
    return Distance(difference if math.isfinite(difference) else math.inf, norm, share)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


@contextmanager
def _watched(job: Job, outcome: TrialResult) -> Iterator[None]:
    """Measure what embedding, blocks and last norm put out, over all ranks that hold a part. Collective.

    A mean does not change where ranks hold the same, nor where recompute repeats it. Compiled blocks are left
    alone.
    """
    shape = job.task.shape
    assert shape is not None, "parity is for decoders"
    names = ["embed", *(f"blocks.{layer}" for layer in range(shape.n_layers)), "norm"]
    sums = torch.zeros(len(names), 2, dtype=torch.float64)

    def watch(place: int, module: nn.Module | None) -> None:
        def add(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            square = output.detach().double().square().sum().cpu()
            sums[place] += torch.stack((square, torch.tensor(output.numel())))

        if module is not None:
            handles.append(module.register_forward_hook(add))

    handles: list[RemovableHandle] = []
    for part in job.model.decoders:
        watch(0, part.embed)
        watch(len(names) - 1, part.norm)
        for layer, block in part.blocks.items():
            watch(1 + int(layer), block)
    yield
    for handle in handles:
        handle.remove()
    totals = torch.tensor(job.process.sum(*sums.flatten().tolist())).view(-1, 2)
    outcome.outputs = {n: math.sqrt(s / c) for n, (s, c) in zip(names, totals.tolist(), strict=True)}


def _reverse_micro_batches(job: Job) -> None:
    forward = job.task.micro_batches

    def backward(batch: HostBatch) -> list[Any]:
        return forward(batch)[::-1]

    job.task.micro_batches = backward  # type: ignore[method-assign]


@contextmanager
def _other_order() -> Iterator[None]:
    """Let every linear layer add up its products in two halves, forward and backward."""
    linear = F.linear

    def halves(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = []  # cut by outputs: the gradient of x is a sum of two
        for part in weight.chunk(2, dim=0):
            (left, right), (first, second) = part.chunk(2, dim=1), x.chunk(2, dim=-1)
            rows.append(linear(first, left) + linear(second, right))
        y = torch.cat(rows, dim=-1)
        return y if bias is None else y + bias.to(y.dtype)

    setattr(F, "linear", halves)  # noqa: B010
    try:
        yield
    finally:
        setattr(F, "linear", linear)  # noqa: B010
