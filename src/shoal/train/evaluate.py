"""Validation and test during training."""

from __future__ import annotations

from typing import Any

import torch

from shoal.config.sections import Config
from shoal.tasks.feed import EvalSet
from shoal.train.job import Job


@torch.no_grad()
def evaluate(job: Job, subset: EvalSet[Any]) -> dict[str, float] | None:
    """Return the mean loss in nats over a fixed sample and what the task finds beside it; None if stopped.

    Sums over all ranks are divided once by the count over all ranks. Collective over the world.
    """
    process, mesh = job.process, job.model.mesh
    totals, count, stopped = [0.0] * job.task.num_sums, 0, False
    job.model.average_statistics()
    job.model.train(on=False)
    for micro, samples, targets, valid in job.task.eval_batches(subset, mesh.dp_rank, mesh.layout.dp):
        if stopped := job.stop.requested():
            break
        for sums in job.model.evaluate([micro], [samples]):
            if valid and mesh.is_loss_rank:
                totals = [a + b for a, b in zip(totals, sums.flatten().tolist(), strict=True)]
                count += targets
    job.model.train(on=True)
    if stopped:
        return None
    *global_totals, global_count = process.sum(*totals, count)
    return job.task.found([total / global_count for total in global_totals])


def validate(job: Job, step: int) -> None:
    """Evaluate on the validation split and record it; a stop leaves a note to do it on resume."""
    if job.validation is None:
        return
    found = evaluate(job, job.validation)
    job.evaluation_pending = found is None
    if found is not None:
        job.metrics.record_evaluation(step, "validation", found)


def validation_is_due(config: Config, step: int) -> bool:
    """Say whether this step ends with a validation: every eval.every steps and at the last one."""
    every = config.eval.every
    return bool(every) and (step % every == 0 or step == config.train.steps)
