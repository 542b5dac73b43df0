"""Validation, test and a sample of text during training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.config.sections import Config
from shoal.tasks.feed import EvalSet
from shoal.tasks.gpt import Gpt
from shoal.train.job import Job

_TEMPERATURE = 0.8


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
    """Evaluate on the validation split and record it; a stop leaves a note to do it on resume.

    Collective over the world.
    """
    if job.validation is not None:
        found = evaluate(job, job.validation)
        job.evaluation_pending = found is None
        if found is None:
            return
        job.metrics.record_evaluation(step, "validation", found)
    if job.config.eval.prompt:
        job.metrics.record_sample(step, sample(job, step))


@torch.no_grad()
def sample(job: Job, step: int) -> str:
    """Return eval.prompt and how the model continues it: the same text under every layout, up to rounding.

    One rank chooses the tokens, from random numbers of its own, so that training has those it always has.
    There is no cache: each token takes a forward pass. Collective over the world.
    """
    task, mesh = job.task, job.model.mesh
    assert isinstance(task, Gpt), "config.rules refuses a prompt for other tasks"
    chooses, random = (
        mesh.is_loss_rank and mesh.dp_rank == 0,
        np.random.default_rng((job.config.train.seed, step)),
    )
    eod_id = task.data.facts()["eod_id"]
    ids = [eod_id, *task.tokenizer.encode(job.config.eval.prompt)]
    job.model.train(on=False)
    for _ in range(job.config.eval.sample_tokens):
        chosen = 0
        for logits in job.model.evaluate([task.window(ids)], [1]):
            scores = logits[0].cpu().numpy() / _TEMPERATURE
            # The largest of scores with Gumbel noise is a draw from their softmax; padding has -inf.
            chosen = int(chooses and (scores + random.gumbel(size=scores.shape)).argmax())
        chosen = int(job.process.sum(chosen)[0])
        if chosen == eod_id or job.stop.requested():
            break
        ids.append(chosen)
    job.model.train(on=True)
    return task.tokenizer.decode(ids[1:])


def validation_is_due(config: Config, step: int) -> bool:
    """Say whether this step ends with a validation: every eval.every steps and at the last one."""
    every = config.eval.every
    return bool(every) and (step % every == 0 or step == config.train.steps)
