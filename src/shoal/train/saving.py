"""What of a job is saved, how it is found again, and how a run ends."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.manifest import (
    WEIGHTS,
    committed,
    read_state,
    read_text,
    resolve_checkpoint,
    step_name,
    step_of,
)
from shoal.config.load import to_toml
from shoal.errors import CheckpointError, ConfigError, DataError
from shoal.gradsync.rounds import KINDS
from shoal.runtime.log import log
from shoal.train.job import Job
from shoal.train.optimiser import optimiser_tensors
from shoal.train.request import refuse_other_run
from shoal.train.schedule import horizon, learning_rate


def resume(job: Job) -> int:
    """Load the newest good checkpoint, or the weights that --init names; return the step to go on from.

    Collective over the world.
    """
    if not job.sync.saves:
        return 0  # the first replica tells this one where it is
    own = job.checkpoints.latest()
    checkpoint = borrowed = own or _of_first_replica(job)
    try:
        if checkpoint is not None:
            if job.request.init is not None:
                log.info(f"--init {job.request.init} does nothing: this run has checkpoints of its own")
            return _resume_from(job, checkpoint, read_state(checkpoint))
        _refuse_to_start_over(job)
        if job.request.init is not None:
            checkpoint = resolve_checkpoint(job.request.init)
            _load_init(job, checkpoint, read_state(checkpoint))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the state of checkpoint {checkpoint} lacks or garbles {error}") from error
    except CheckpointError as error:
        if own or not borrowed:
            raise
        # The first replica trains on, and keeps only so many: no error of the user's, and a new start helps.
        raise RuntimeError(f"{borrowed} went while it was read: {error}") from error
    return 0


def _of_first_replica(job: Job) -> Path | None:
    """Return the newest good checkpoint of the first replica, for another one that is new in its run.

    Rank 0 chooses, as another rank might see a newer one. Collective over the world.
    """
    island = job.request.island
    if island is None or not island.replica:
        return None
    first, step = job.request.run_of_first / "checkpoints", 0
    if job.process.rank == 0:
        step = (step_of(resolve_checkpoint(first)) or 0) if committed(first) else -1
    chosen = int(job.process.sum(step)[0])
    if chosen < 0:
        return None
    log.info(f"replica {island.replica} is new: it begins from {first / step_name(chosen)}")
    return first / step_name(chosen)


def _refuse_to_start_over(job: Job) -> None:
    """Training from step 1 in a run whose checkpoints are all damaged must be the user's own decision."""
    damaged = sorted((job.run_dir / "checkpoints").glob("bad-step-*"))
    if damaged:
        raise CheckpointError(
            f"all checkpoints of {job.run_dir} are damaged: {', '.join(path.name for path in damaged)}",
            hint=f"`shoal checkpoint verify {job.run_dir}` takes back what is whole; else restore one from a "
            "copy, or start anew with another --run-dir",
        )


def _resume_from(job: Job, checkpoint: Path, state: dict[str, Any]) -> int:
    for name, new, old in refuse_other_run(job.config, _stored_config(checkpoint), checkpoint):
        log.info(f"changed since the checkpoint: {name} = {new} (was {old}){_rate(job, name)}")
    _refuse_other_data(job, state, checkpoint)
    step = int(state["step"])
    if step != step_of(checkpoint):
        raise CheckpointError(f"{checkpoint} holds the state of step {step}: its files were mixed up")
    if step > job.config.train.steps:
        raise ConfigError(
            f"{checkpoint} is at step {step}, beyond train.steps = {job.config.train.steps}",
            hint=f"use --train.steps {step} or more, or another --run-dir",
        )
    apart = job.sync.expect(state.get("sync", {}))
    job.checkpoints.load(checkpoint, _tensors(job) | {f"sync.{name}": t for name, t in apart.items()})
    _take_over(job, state)
    job.saved_step = step
    log.info(
        f"resumed from {checkpoint.name}"
        + (f" (restart {job.process.seat.attempt})" if job.process.seat.attempt else "")
    )
    return step


def _rate(job: Job, name: str) -> str:
    """Say where the learning rate ends if `name` decides it: min_lr = None is a tenth of the peak, or 0."""
    end = learning_rate(job.config, horizon(job.config))
    return f": the learning rate ends at {end:g}" if name == "schedule.min_lr" else ""


def _take_over(job: Job, state: dict[str, Any]) -> None:
    job.guard.load(state["guard"])
    job.precision.scaler.load(state["scaler"])
    job.skipped = int(state["skipped"])
    job.lineage = tuple(state["lineage"])
    job.evaluation_pending = bool(state["evaluation_pending"])


def save(job: Job, step: int) -> None:
    """Start saving the job as it is after `step`; training waits for the copy to host memory only."""
    if job.saved_step == step or not job.sync.saves:
        return
    files = {"config.toml": to_toml(job.config).encode()}
    if job.process.rank == 0:
        files |= job.task.data.files()
    job.metrics.record_save(
        step, job.checkpoints.save(step, _tensors(job, saving=True), _state(job, step), files)
    )
    job.saved_step = step


def save_is_due(job: Job, step: int) -> bool:
    """Say whether this step ends with a checkpoint."""
    every = job.config.checkpoint.every
    return bool(every) and step % every == 0


def _tensors(job: Job, *, saving: bool = False) -> dict[str, Tensor]:
    """Name every tensor of the job: model.<parameter>, optimizer.<parameter>.<key>, sync.<the strategy's>.

    What the first pipeline part has, too, is loaded by both and saved by that one.
    """
    weights = job.model.named_weights()
    moments = optimiser_tensors(job.model.updated_weights(), job.optimiser)
    tensors = {**_weights(weights), **{f"optimizer.{name}": tensor for name, tensor in moments.items()}}
    if not saving:
        return tensors
    tensors |= {f"sync.{name}": tensor for name, tensor in job.sync.tensors().items()}
    kinds = ("model", "optimizer", *(f"sync.{kind}" for kind in KINDS))
    skipped = tuple(f"{kind}.{name}" for kind in kinds for name in job.model.elsewhere)
    return {name: t for name, t in tensors.items() if not name.startswith(skipped)}


def _weights(named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {f"{WEIGHTS}.{name}": weight for name, weight in named.items()}


def _state(job: Job, step: int) -> dict[str, Any]:
    return {
        "step": step,
        job.task.data.unit: step * job.task.targets_per_step,
        "loss": job.metrics.last_loss,
        "datasets": _fingerprints(job),
        **job.task.facts(),
        **job.task.data.facts(),
        "world_size": job.process.world_size,
        "layout": str(job.model.mesh.layout),
        "guard": job.guard.state(),
        "scaler": job.precision.scaler.state(),
        "skipped": job.skipped,
        "evaluation_pending": job.evaluation_pending,
        "lineage": list(job.lineage),
        "sync": job.sync.state(),
        "versions": {"shoal": importlib.metadata.version("shoal"), "torch": torch.__version__},
    }


def _load_init(job: Job, checkpoint: Path, state: dict[str, Any]) -> None:
    """Start a new run from the weights of any checkpoint, with its moments only if asked for."""
    theirs, ours = state.get("network", "decoder"), job.config.model.network
    if theirs != ours:
        raise ConfigError(
            f"{checkpoint} holds the weights of a {theirs}, and model.network = {ours}",
            hint=f"use model.network = {theirs}, or leave --init out",
        )
    job.task.data.refuse_other(state, checkpoint)
    tensors = _tensors(job) if job.request.init_optimizer else _weights(job.model.named_weights())
    job.checkpoints.load(checkpoint, tensors)
    parent = {
        "checkpoint": str(checkpoint.resolve()),
        "step": state["step"],
        job.task.data.unit: state[job.task.data.unit],
        "datasets": state["datasets"],
        "optimizer": job.request.init_optimizer,
    }
    job.lineage = (*state["lineage"], parent)
    log.info(f"weights from {checkpoint} (step {state['step']}); step, schedule and data start anew")


def _stored_config(checkpoint: Path) -> str:
    return read_text(checkpoint, "config.toml")


def _fingerprints(job: Job) -> list[dict[str, str]]:
    return [
        {"path": str(dataset.path), "fingerprint": dataset.fingerprint} for dataset in job.task.data.datasets
    ]


def _refuse_other_data(job: Job, state: dict[str, Any], checkpoint: Path) -> None:
    was = [entry["fingerprint"] for entry in state["datasets"]]
    now = [entry["fingerprint"] for entry in _fingerprints(job)]
    if was != now:
        raise DataError(
            f"the data changed since {checkpoint}: fingerprint(s) {', '.join(was)} then, "
            f"{', '.join(now)} now",
            hint=f"restore the dataset, or start a new run with --run-dir NEW --init {checkpoint}",
        )
