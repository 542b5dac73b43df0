"""The body of an optimiser step: forward and backward over the micro-batches, clip, update."""

from __future__ import annotations

import math

from shoal.errors import ShoalError
from shoal.tasks.feed import HostBatch
from shoal.train.job import Job
from shoal.train.optimiser import clip_gradients
from shoal.train.schedule import learning_rate


def forward_backward(job: Job, batch: HostBatch) -> float:
    """Leave the gradient of the mean loss over the step's targets in the parameters; return that loss.

    Losses are summed and divided once, by the global number of targets, so no layout changes the result.
    Collective over the world.
    """
    job.model.forget_gradients()
    job.model.exchange.begin(batch.step, job.precision.scaler.scale)
    with job.clock.phase("data"):
        micro_batches = job.task.micro_batches(batch)
    total = job.model.forward_backward(micro_batches, job.precision.scaler.scale / batch.global_targets)
    with job.clock.phase("communication"):
        job.model.finish_gradients()
        known = total.item() if job.model.mesh.speaks_for_its_tokens else 0.0
        return job.process.sum(known)[0] / batch.global_targets


def clip(job: Job) -> float:
    """Take the loss scale out and clip to the global norm allowed; return the norm before clipping.

    Collective over the world, if the model is cut or its weights have owners.
    """
    with job.clock.phase("optimiser"):
        return clip_gradients(job.model, job.config.optimizer.clip, job.precision.scaler.scale)


def update(job: Job, step: int, loss: float, grad_norm: float) -> bool:
    """Take the optimiser step, unless fp16 overflowed or the guard objects; return whether it was taken.

    Then replicas do for each other what their strategy asks. Collective over the world.
    """
    applied = _take_step(job, step, loss, grad_norm)
    with job.clock.phase("communication"):
        job.sync.after_step(step)
    return applied


def _take_step(job: Job, step: int, loss: float, grad_norm: float) -> bool:
    scaler = job.precision.scaler
    overflow = scaler.dynamic and job.process.any(not math.isfinite(grad_norm))
    left_out = scaler.update(overflow)
    applied = not left_out and _guard_allows(job, step, loss, grad_norm)
    job.model.exchange.end(applied=applied and math.isfinite(grad_norm))
    if not applied:
        job.skipped += 1
        return False
    with job.clock.phase("optimiser"):
        job.sync.take_step(job.optimiser.step, learning_rate(job.config, step, job.skipped))
    return True


def _guard_allows(job: Job, step: int, loss: float, grad_norm: float) -> bool:
    """Ask the guard; where it ends the run, the save in flight, which is good, is finished first."""
    try:
        return job.guard.allows(step, loss, grad_norm, job.task.loader.step_samples(step))
    except ShoalError:
        job.checkpoints.wait()
        raise
