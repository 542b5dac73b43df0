"""The training loop: one iteration is one optimiser step."""

from __future__ import annotations

from shoal.runtime.log import log
from shoal.train.evaluate import evaluate, validate, validation_is_due
from shoal.train.job import Job
from shoal.train.saving import resume, save, save_is_due
from shoal.train.step import clip, forward_backward, update


def train(job: Job) -> bool:
    """Run from the last committed step to the end; return False when stopped early on request.

    Collective over the world.
    """
    step = start = job.sync.start(resume(job))
    job.metrics.start(start, job.sync)
    if not _verify(job, start) and job.sync.stopping(start, asked=True):
        return _finish(job, start)
    if job.evaluation_pending:
        validate(job, start)
        # Stopped again before it was done; where others have to agree, they do so after some steps.
        if job.evaluation_pending and job.sync.stopping(start, asked=True):
            return _finish(job, start)
    for step in range(start + 1, job.config.train.steps + 1):
        job.clock.begin(step)
        job.profiler.begin(step)
        with job.clock.phase("data"):
            batch = job.task.batch(step)
        loss = forward_backward(job, batch)
        grad_norm = clip(job)
        applied = update(job, step, loss, grad_norm)
        job.metrics.record(
            step,
            loss=loss,
            grad_norm=grad_norm,
            applied=applied,
            skipped=job.skipped,
            scale=job.precision.scaler.scale,
        )
        if validation_is_due(job, step):
            validate(job, step)
        job.verifier.poll()
        if save_is_due(job, step):
            job.verifier.wait()
            save(job, step)
        job.checkpoints.poll()
        stopping = job.sync.stopping(step, asked=job.stop.requested(step))
        job.profiler.end(step, stopping=stopping)
        if stopping:
            break
    return _finish(job, step)


def _verify(job: Job, start: int) -> bool:
    """Begin to verify the data, and end it with data.verify = full; return False when stopped meanwhile.

    Collective over the world.
    """
    job.verifier.begin(start)
    if job.config.data.verify == "full":
        while job.process.any(job.verifier.blocks_training()):
            if job.stop.requested():
                return False
    return True


def _finish(job: Job, step: int) -> bool:
    """Save, wait for the commit, test the finished model; return False when the run is to be continued."""
    job.task.close()
    done = step == job.config.train.steps
    if done:  # a stop on request has no time for it
        job.verifier.wait()
    save(job, step)
    job.sync.close()
    job.checkpoints.wait()
    if done and job.test is not None:
        found = evaluate(job, job.test)
        done = found is not None
        if found is not None:
            job.metrics.record_evaluation(step, "test", found)
    if not done:
        log.info(
            f"stopped after step {step} by {job.stop.reason}; all is saved: run the same command to continue"
        )
    job.metrics.finish(complete=done)
    return done
