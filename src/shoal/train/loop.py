"""The training loop: one iteration is one optimiser step."""

from __future__ import annotations

from shoal.runtime.log import log
from shoal.tasks.feed import HostBatch
from shoal.train.evaluate import evaluate, validate, validation_is_due
from shoal.train.job import Job
from shoal.train.saving import resume, save, save_is_due
from shoal.train.step import agree, forward_backward, judge_taken, take_unjudged, update


def train(job: Job) -> bool:
    """Run from the last committed step to the end; return False when stopped early on request.

    Collective over the world.
    """
    config = job.config
    step = start = job.replicas.start(resume(job))
    job.metrics.start(start, job.replicas)
    if not _verify(job, start) and job.replicas.stopping(start, asked=True):
        return _finish(job, start)
    if job.evaluation_pending:
        validate(job, start)
        # Stopped again before it was done; where others have to agree, they do so after some steps.
        if job.evaluation_pending and job.replicas.stopping(start, asked=True):
            return _finish(job, start)
    for step in range(start + 1, config.train.steps + 1):
        job.clock.begin(step)
        job.profiler.begin(step)
        with job.clock.phase("data"):
            batch = job.task.batch(step)
        _take_step(job, batch)
        if validation_is_due(config, step):
            validate(job, step)
        job.verifier.poll()
        if save_is_due(config, step):
            job.verifier.wait()
            save(job, step)
        job.checkpoints.poll()
        stopping = job.replicas.stopping(step, asked=bool(job.stop.reason))
        job.profiler.end(step, stopping=stopping)
        if stopping:
            break
    return _finish(job, step)


def _take_step(job: Job, batch: HostBatch) -> None:
    config, step, late = job.config, batch.step, job.config.guard.late
    total = forward_backward(job, batch)
    if late:
        values, applied = take_unjudged(job, batch, total), True
    else:
        result = agree(job, batch, total)
        applied = update(job, result)
    facts = job.metrics.facts(step, applied=applied, skipped=job.skipped, scale=job.precision.scaler.scale)
    if not late:
        job.metrics.record(facts, loss=result.loss, grad_norm=result.grad_norm)
        return
    job.unjudged.append((facts, values))
    due = validation_is_due(config, step) or save_is_due(config, step) or bool(job.stop.reason)
    if due or job.metrics.logs(step):
        judge_taken(job, step)
    elif config.guard.checks:
        judge_taken(job, step - 1)


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
    job.replicas.close()
    job.checkpoints.wait()
    if done and job.test is not None:
        found = evaluate(job, job.test)
        done = found is not None
        if found is not None:
            job.metrics.record_evaluation(step, "test", found)
    if not done:
        log.info(
            f"stopped after step {step} by {job.stop.reason}; all is saved\n"
            "run the same command again to continue"
        )
    job.metrics.finish(complete=done)
    return done
