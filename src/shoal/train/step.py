"""The body of an optimiser step: forward and backward over the micro-batches, one agreement, clip, update.

With guard.late, a step is taken without a look at the device, whose values are judged later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ShoalError
from shoal.tasks.feed import HostBatch
from shoal.train.job import Job
from shoal.train.optimiser import clip_gradients, unscale_gradients
from shoal.train.schedule import learning_rate


@dataclass(frozen=True)
class StepResult:
    """What all ranks know of a step before its update."""

    step: int
    loss: float  # mean over the targets of all ranks
    grad_norm: float  # before clipping
    overflow: bool  # some rank's gradients are not finite


def forward_backward(job: Job, batch: HostBatch) -> Tensor:
    """Leave the gradient of the mean loss over the step's targets in the parameters.

    Returns the summed loss of this rank's targets, on its device; 0 where another rank knows it. Losses are
    summed and divided once, by the global number of targets, so no layout changes the result. Collective over
    the world.
    """
    job.model.forget_gradients()
    job.model.exchange.begin(batch.step, job.precision.scaler.scale)
    with job.clock.phase("data"):
        micro_batches = job.task.micro_batches(batch)
    total = job.model.forward_backward(micro_batches, job.precision.scaler.scale / batch.global_targets)
    with job.clock.phase("communication"):
        job.model.finish_gradients()
    return total if job.model.mesh.is_loss_rank else torch.zeros_like(total)


def agree(job: Job, batch: HostBatch, total: Tensor) -> StepResult:
    """Take the loss scale out, clip to the global norm allowed, and hear of stop requests.

    Device values are read once, and all that ranks must know of each other is in one message.
    Collective over the world.
    """
    norm = job.model.gradient_norm
    with job.clock.phase("optimiser"):
        unscale_gradients(job.model, job.precision.scaler.scale)
        squares = norm.squares()
        loss, square = torch.stack([total.double(), squares.to(total.device)]).tolist()
    with job.clock.phase("communication"):
        own = (loss, square * norm.is_partial, float(not math.isfinite(square)))
        loss, together, overflows, *votes = job.process.sum(*own, *job.stop.votes(batch.step))
    job.stop.count(votes)
    grad_norm = math.sqrt(together if norm.is_partial else square)
    with job.clock.phase("optimiser"):
        clip_gradients(job.model, grad_norm, job.config.optimizer.clip)
    return StepResult(batch.step, loss / batch.global_targets, grad_norm, overflows > 0)


def take_unjudged(job: Job, batch: HostBatch, total: Tensor) -> Tensor:
    """Clip and take the optimiser step without a look at the device; hear of stop requests.

    Returns the mean loss and the gradient norm, in float64 on their way to the host. Collective over the
    world.
    """
    norm = job.model.gradient_norm
    with job.clock.phase("optimiser"):
        unscale_gradients(job.model, 1.0)
        squares = norm.squares().to(total.device)
    with job.clock.phase("communication"):
        sums = torch.stack([total.double(), squares])
        dist.all_reduce(sums)
        job.stop.requested(batch.step)
    with job.clock.phase("optimiser"):
        grad_norm = (sums[1] if norm.is_partial else squares).sqrt()
        clip_gradients(job.model, grad_norm, job.config.optimizer.clip)
        job.model.exchange.end(applied=True)
        job.replicas.take_step(job.optimiser.step, learning_rate(job.config, batch.step, job.skipped))
        return torch.stack([sums[0] / batch.global_targets, grad_norm]).to("cpu", non_blocking=True)


def judge_taken(job: Job, through: int) -> None:
    """Read, judge and record the steps that `take_unjudged` has taken up to one.

    Collective over the world on log steps.
    """
    while job.unjudged and job.unjudged[0][0].step <= through:
        facts, values = job.unjudged.popleft()
        facts.time.wait()  # and so for the values, which were sent before the step ended
        loss, grad_norm = values.tolist()
        _guard_allows(job, StepResult(facts.step, loss, grad_norm, overflow=False))
        job.metrics.record(facts, loss=loss, grad_norm=grad_norm)


def update(job: Job, result: StepResult) -> bool:
    """Take the optimiser step, unless fp16 overflowed or the guard objects; return whether it was taken.

    Then replicas do for each other what their strategy asks. Collective over the world.
    """
    applied = _take_step(job, result)
    with job.clock.phase("communication"):
        job.replicas.after_step(result.step)
    return applied


def _take_step(job: Job, result: StepResult) -> bool:
    left_out = job.precision.scaler.update(result.overflow)
    applied = not left_out and _guard_allows(job, result)
    job.model.exchange.end(applied=applied and math.isfinite(result.grad_norm))
    if not applied:
        job.model.undo_statistics()
        job.skipped += 1
        return False
    with job.clock.phase("optimiser"):
        job.replicas.take_step(job.optimiser.step, learning_rate(job.config, result.step, job.skipped))
    return True


def _guard_allows(job: Job, result: StepResult) -> bool:
    """Ask the guard; where it ends the run, the save in flight, which is good, is finished first."""
    samples = job.task.loader.step_samples(result.step)
    try:
        return job.guard.allows(result.step, result.loss, result.grad_norm, samples)
    except ShoalError:
        job.checkpoints.wait()
        raise
