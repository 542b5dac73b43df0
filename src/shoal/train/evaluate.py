"""Validation and test during training."""

from __future__ import annotations

import torch

from shoal.tasks.gpt import EvalSet, MicroBatch
from shoal.train.job import Job


@torch.no_grad()
def evaluate(job: Job, subset: EvalSet) -> float | None:
    """Return the mean loss in nats per token over a fixed sample of windows; None where a stop was asked for.

    The sum over all ranks is divided once by the count over all ranks. Collective over the world.
    """
    process, mesh = job.process, job.model.mesh
    total, count, stopped = 0.0, 0, False
    job.model.train(on=False)
    batches = subset.batches(mesh.dp_rank, mesh.layout.dp, process.device.torch_device)
    for tokens_bt, valid in batches:
        if stopped := job.stop.requested():
            break
        for loss in job.model.evaluate([MicroBatch(tokens_bt, None)], [len(tokens_bt)]):
            if valid and mesh.speaks_for_its_tokens:
                total += loss.item()
                count += tokens_bt[:, 1:].numel()
    job.model.train(on=True)
    if stopped:
        return None
    global_total, global_count = process.sum(total, count)
    return global_total / global_count


def validate(job: Job, step: int) -> None:
    """Evaluate on the validation split and record it; a stop leaves a note to do it on resume."""
    if job.validation is None:
        return
    loss = evaluate(job, job.validation)
    job.evaluation_pending = loss is None
    if loss is not None:
        job.metrics.record_evaluation(step, "validation", loss)


def validation_is_due(job: Job, step: int) -> bool:
    """Say whether this step ends with a validation: every eval.every steps and at the last one."""
    every = job.config.eval.every
    return bool(every) and (step % every == 0 or step == job.config.train.steps)
