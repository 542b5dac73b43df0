"""What of a job is saved, how it is found again, and how a run ends."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from shoal.config.sections import Config
from shoal.data.chat import chat_files
from shoal.errors import CheckpointError, ConfigError, DataError
from shoal.runtime.log import log
from shoal.runtime.process import Process
from shoal.tasks.task import Dataset
from shoal.train.job import Job
from shoal.train.optimiser import optimiser_tensors
from shoal.train.request import Request, refuse_other_run, refuse_other_shape
from shoal.train.schedule import horizon, learning_rate

# Attributes of a job that a checkpoint keeps, and what they are made of.
KEPT: dict[str, type] = {"skipped": int, "evaluation_pending": bool, "lineage": tuple}


def resume(job: Job) -> int:
    """Load the newest good checkpoint, or the weights that --init names; return the step to go on from.

    Collective over the world.
    """
    if not job.replicas.saves:
        return 0  # the first replica tells this one where it is
    own = job.checkpoints.latest()
    checkpoint = borrowed = own or _of_first_replica(job.request, job.process)
    try:
        if checkpoint is not None:
            if job.request.init is not None:
                log.info(f"--init {job.request.init} does nothing: this run has checkpoints of its own")
            return _resume_from(job, checkpoint, read_state(checkpoint))
        _refuse_to_start_over(job.run_dir)
        if job.request.init is not None:
            from shoal.interop.importing import as_checkpoint

            checkpoint = as_checkpoint(job.request.init, job.run_dir)
            _load_init(job, checkpoint, read_state(checkpoint))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the state of checkpoint {checkpoint} has a missing or invalid entry: {error}"
        ) from error
    except CheckpointError as error:
        if own or not borrowed:
            raise
        # The first replica trains on, and keeps only so many: no error of the user's, and a new start helps.
        raise RuntimeError(f"{borrowed} went while it was read: {error}") from error
    return 0


def _of_first_replica(request: Request, process: Process) -> Path | None:
    """Return the newest good checkpoint of the first replica, for another one that is new in its run.

    Rank 0 chooses, as another rank might see a newer one. Collective over the world.
    """
    group = request.replica_group
    if group is None or not group.replica:
        return None
    first, step = request.run_of_first / "checkpoints", 0
    if process.rank == 0:
        step = (step_of(resolve_checkpoint(first)) or 0) if committed(first) else -1
    chosen = int(process.sum(step)[0])
    if chosen < 0:
        return None
    log.info(f"replica {group.replica} is new: it begins from {first / step_name(chosen)}")
    return first / step_name(chosen)


def _refuse_to_start_over(run_dir: Path) -> None:
    """Training from step 1 in a run whose checkpoints are all damaged must be the user's own decision."""
    damaged = sorted((run_dir / "checkpoints").glob("bad-step-*"))
    if damaged:
        raise CheckpointError(
            f"all checkpoints of {run_dir} are damaged: {', '.join(path.name for path in damaged)}",
            hint=f"`shoal checkpoint verify {run_dir}` takes back what is whole; else restore one from a "
            "copy, or start anew with another --run-dir",
        )


def _resume_from(job: Job, checkpoint: Path, state: dict[str, Any]) -> int:
    for name, new, old in refuse_other_run(job.config, _stored_config(checkpoint), checkpoint):
        log.info(f"changed since the checkpoint: {name} = {new} (was {old}){_rate(job.config, name)}")
    for name, value in job.task.facts().items():
        if state.get(name, value) != value and not (name == "network" and "layers" in state):
            raise ConfigError(
                f"{checkpoint} belongs to another run: {name} of its network was {state[name]}, now {value}",
                hint="restore the network's description, or start a new run with another --run-dir",
            )
    _refuse_other_data(job.task.data.datasets, state, checkpoint)
    step = int(state["step"])
    if step != step_of(checkpoint):
        raise CheckpointError(f"{checkpoint} holds the state of step {step}: its files were mixed up")
    if step > job.config.train.steps:
        raise ConfigError(
            f"{checkpoint} is at step {step}, beyond train.steps = {job.config.train.steps}",
            hint=f"use --train.steps {step} or more, or another --run-dir",
        )
    job.checkpoints.load(checkpoint, _expected(entries_of(job), state))
    for entry in entries_of(job):
        if entry.take:
            entry.take(state[entry.name])
    job.chat = chat_files(checkpoint)
    job.saved_step = step
    log.info(
        f"resumed from {checkpoint.name}"
        + (f" (restart {job.process.info.attempt})" if job.process.info.attempt else "")
    )
    return step


def _rate(config: Config, name: str) -> str:
    """Say where the learning rate ends if `name` decides it: min_lr = None is a tenth of the peak, or 0."""
    end = learning_rate(config, horizon(config))
    return f": the learning rate ends at {end:g}" if name == "schedule.min_lr" else ""


def save(job: Job, step: int) -> None:
    """Start saving the job as it is after `step`; training waits for the copy to host memory only."""
    if job.saved_step == step or not job.replicas.saves:
        return
    files = {"config.toml": to_toml(job.config).encode()}
    if job.process.rank == 0:
        files |= job.task.data.files() | job.chat
    job.metrics.record_save(step, job.checkpoints.save(step, _tensors(job), _state(job, step), files))
    job.saved_step = step


def save_is_due(config: Config, step: int) -> bool:
    """Say whether this step ends with a checkpoint."""
    every = config.checkpoint.every
    return bool(every) and step % every == 0


@dataclass(frozen=True)
class Entry:
    """A checkpoint entry: named tensors, JSON facts, or both, and how to restore them."""

    name: str
    tensors: Callable[[], Mapping[str, Tensor]] = dict
    facts: Callable[[], Any] | None = None  # JSON values
    expect: Callable[[Any], dict[str, Tensor]] | None = None  # the tensors to fill, if not `tensors`
    take: Callable[[Any], None] | None = None  # the facts, once the tensors are filled


def entries_of(job: Job) -> list[Entry]:
    """Return all that a checkpoint of this job holds; saving and resuming walk this list."""
    replicas, guard, scaler = job.replicas, job.guard, job.precision.scaler
    return [
        Entry(WEIGHTS, job.model.named_weights),
        Entry("statistics", job.model.average_statistics),
        Entry("optimizer", lambda: optimiser_tensors(job.model.updated_weights(), job.optimiser)),
        Entry("sync", replicas.tensors, replicas.state, replicas.expect),
        Entry("guard", facts=guard.state, take=guard.load),
        Entry("scaler", facts=scaler.state, take=scaler.load),
        *(_attribute(job, name, kind) for name, kind in KEPT.items()),
    ]


def _attribute(job: Job, name: str, kind: type) -> Entry:
    return Entry(name, facts=lambda: getattr(job, name), take=lambda value: setattr(job, name, kind(value)))


def _expected(entries: Sequence[Entry], state: dict[str, Any]) -> dict[str, Tensor]:
    """Name every tensor to fill from a checkpoint with this state."""
    expected: dict[str, Tensor] = {}
    for entry in entries:
        named = entry.expect(state.get(entry.name, {})) if entry.expect else entry.tensors()
        expected |= {f"{entry.name}.{name}": tensor for name, tensor in named.items()}
    return expected


def _tensors(job: Job) -> dict[str, Tensor]:
    """Name every tensor to save; what the first pipeline stage has, too, is saved by that one."""
    tensors = {
        f"{entry.name}.{name}": tensor
        for entry in entries_of(job)
        for name, tensor in entry.tensors().items()
    }
    kinds = (WEIGHTS, "optimizer", *(f"sync.{kind}" for kind in job.replicas.kinds))
    duplicates = tuple(f"{kind}.{name}" for kind in kinds for name in job.model.tied_duplicates)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(duplicates)}


def _state(job: Job, step: int) -> dict[str, Any]:
    return {
        "step": step,
        job.task.data.unit: step * job.task.targets_per_step,
        "loss": job.metrics.last_loss,
        "datasets": _fingerprints(job.task.data.datasets),
        **job.task.facts(),
        **job.task.data.facts(),
        "world_size": job.process.world_size,
        "layout": str(job.model.mesh.layout),
        **{entry.name: entry.facts() for entry in entries_of(job) if entry.facts},
        "versions": {"shoal": importlib.metadata.version("shoal"), "torch": torch.__version__},
    }


def _load_init(job: Job, checkpoint: Path, state: dict[str, Any]) -> None:
    """Start a new run from the weights of any checkpoint, with its moments only if asked for."""
    theirs, ours = state.get("network", "decoder"), job.config.model.network
    facts = job.task.facts()
    by = "layers" if "layers" in facts and "layers" in state else "network"  # a description may have moved
    if state.get(by, "decoder") != facts.get(by, "decoder"):
        raise ConfigError(
            f"{checkpoint} holds the weights of a {theirs}{' with other layers' * (theirs == ours)}, and "
            f"model.network = {ours}",
            hint=f"use model.network = {theirs}, or leave --init out",
        )
    job.task.data.refuse_other(state, checkpoint)
    refuse_other_shape(job.config, _stored_config(checkpoint), checkpoint)
    kinds = (WEIGHTS, "statistics", *(["optimizer"] if job.request.init_optimizer else []))
    entries = [entry for entry in entries_of(job) if entry.name in kinds]
    wanted = {f"{entry.name}.{name}": t for entry in entries for name, t in entry.tensors().items()}
    job.checkpoints.load(checkpoint, wanted)
    parent = {
        "checkpoint": str(checkpoint.resolve()),
        "step": state["step"],
        job.task.data.unit: state[job.task.data.unit],
        "datasets": state["datasets"],
        "optimizer": job.request.init_optimizer,
    }
    job.lineage = (*state["lineage"], parent)
    job.chat = chat_files(checkpoint)
    log.info(f"weights from {checkpoint} (step {state['step']}); step, schedule and data start anew")


def _stored_config(checkpoint: Path) -> str:
    return read_text(checkpoint, "config.toml")


def _fingerprints(datasets: Sequence[Dataset]) -> list[dict[str, str]]:
    return [{"path": str(dataset.path), "fingerprint": dataset.fingerprint} for dataset in datasets]


def _refuse_other_data(datasets: Sequence[Dataset], state: dict[str, Any], checkpoint: Path) -> None:
    was = [entry["fingerprint"] for entry in state["datasets"]]
    now = [entry["fingerprint"] for entry in _fingerprints(datasets)]
    if was != now:
        raise DataError(
            f"the data changed since {checkpoint}: fingerprint {', '.join(was)} then, {', '.join(now)} now",
            hint=f"restore the dataset, or start a new run with --run-dir NEW --init {checkpoint}",
        )
