"""The body of an optimiser step: forward and backward over the micro-batches, clip, update."""

from __future__ import annotations

import torch

from shoal.data.loader import Batch
from shoal.train.job import Job
from shoal.train.optimiser import clip_gradients, set_learning_rate
from shoal.train.schedule import learning_rate


def forward_backward(job: Job, batch: Batch) -> float:
    """Leave the gradient of the mean loss over the step's tokens in the parameters; return that loss.

    Losses are summed and divided once, by the global number of tokens, so no layout changes the result.
    Collective over the world.
    """
    job.optimiser.zero_grad(set_to_none=True)
    total = torch.zeros((), device=job.process.device.torch_device)
    with job.clock.phase("data"):
        micro_batches = job.task.micro_batches(batch)
    for number, micro in enumerate(micro_batches, start=1):
        with job.replicated.micro_step(last=number == len(micro_batches)):
            with job.clock.phase("forward"), job.precision.autocast():
                loss_sum = job.task.loss(job.replicated.forward, micro)
            with job.clock.phase("backward"):
                (loss_sum / batch.global_tokens).backward()
        total += loss_sum.detach()
    with job.clock.phase("communication"):
        job.replicated.sync.wait()
        return job.process.sum(total.item())[0] / batch.global_tokens


def clip(job: Job) -> float:
    """Clip the gradients to the global norm that the configuration allows; return the norm before."""
    with job.clock.phase("optimiser"):
        return clip_gradients(job.replicated.bare.parameters(), job.config.optimizer.clip)


def update(job: Job, step: int) -> None:
    """Take the optimiser step at the rate of the schedule."""
    with job.clock.phase("optimiser"):
        set_learning_rate(job.optimiser, learning_rate(job.config, step))
        job.optimiser.step()
