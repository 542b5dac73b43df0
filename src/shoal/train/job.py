"""The one place where a training job is put together. Everything it holds is made here and named once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.checkpoint.store import CheckpointStore
from shoal.config.sections import Config
from shoal.data.verify import Verifier
from shoal.gradsync.choose import make_replicas
from shoal.gradsync.replicas import Replica, SynchronousReplicas, Update
from shoal.models.loss import CrossEntropy
from shoal.parallel.apply import CutModel, apply
from shoal.parallel.compile import Compilation, decide
from shoal.parallel.tensor import Axis, VocabularyPart
from shoal.runtime.compiler import keep_compiled_in
from shoal.runtime.device import compute_reproducibly
from shoal.runtime.log import log
from shoal.runtime.mesh import make_mesh
from shoal.runtime.process import Process
from shoal.runtime.stop import Stop
from shoal.tasks.feed import EvalSet
from shoal.tasks.task import Task
from shoal.train.clock import StepClock
from shoal.train.guard import LossGuard
from shoal.train.metrics import Metrics, StepFacts
from shoal.train.optimiser import Optimiser, build_optimiser, optimiser_tensors
from shoal.train.precision import Precision
from shoal.train.profiler import StepProfiler
from shoal.train.request import Request
from shoal.train.schedule import learning_rate


@dataclass
class Job:
    """A training job on one rank."""

    request: Request
    config: Config  # resolved: the vocabulary is the dataset's
    process: Process
    task: Task[Any, Any]
    model: CutModel[Any]
    replicas: SynchronousReplicas
    compilation: Compilation
    optimiser: Optimiser
    precision: Precision
    validation: EvalSet[Any] | None
    test: EvalSet[Any] | None
    guard: LossGuard
    clock: StepClock
    metrics: Metrics
    profiler: StepProfiler
    checkpoints: CheckpointStore
    verifier: Verifier
    stop: Stop
    skipped: int = 0  # steps left out so far, by fp16 overflow or by the guard
    saved_step: int = 0  # of the newest checkpoint that was committed or is being written
    evaluation_pending: bool = False  # a stop came before the validation of the newest step was done
    lineage: tuple[dict[str, object], ...] = ()  # the checkpoints that the weights come from
    chat: dict[str, bytes] = field(default_factory=dict)  # files of a chat template that came with --init
    unjudged: deque[tuple[StepFacts, Tensor]] = field(default_factory=deque)  # steps, with guard.late

    @property
    def run_dir(self) -> Path:
        return self.request.run_dir


def build_job(request: Request, process: Process, stop: Stop) -> Job:
    """Open the data and build model, optimiser and all collaborators. Collective over the world."""
    task = request.check(process.world_size)
    config, shape = task.config, task.shape
    layout = request.resolve_layout(process.world_size)
    mesh = make_mesh(process, layout, config.runtime.timeout_s)
    device = process.device.torch_device
    compute_reproducibly(config.train.deterministic)
    precision = Precision(config.precision, device)
    compilation = decide(config, shape, process)
    if compilation.on or compilation.loss:
        keep_compiled_in(request.run_dir / "compiled")
    clock = StepClock(process.device)
    axis = Axis(mesh["tp"], clock.phase) if layout.tp > 1 else None
    columns = VocabularyPart(axis, shape.padded_vocab_size) if axis and shape else None
    cross_entropy = CrossEntropy(columns, compiled=compilation.loss)
    first = layout.dp * (request.replica_group.replica if request.replica_group else 0)
    place = first + mesh.dp_rank, layout.batch_parts, layout.replica_groups
    task.begin(*place, device, precision.autocast, cross_entropy)
    model = apply(task, mesh, process, config, compilation, axis, clock.phase)
    metrics = Metrics(
        request.run_dir, task, process, precision, clock, model.own_parameters, layout.replica_groups
    )
    optimiser = build_optimiser(model.updated_weights(), config.optimizer)
    return Job(
        request=request,
        config=config,
        process=process,
        task=task,
        model=model,
        replicas=model.owners or _make_replicas(request, task, model, optimiser, process, metrics, stop),
        optimiser=optimiser,
        compilation=compilation,
        precision=precision,
        validation=_eval_set(task, "validation"),
        test=_eval_set(task, "test"),
        guard=LossGuard(config.guard, request.run_dir / "incidents.jsonl" if process.rank == 0 else None),
        clock=clock,
        metrics=metrics,
        profiler=StepProfiler(config.train.profile, request.run_dir, process.rank, clock),
        checkpoints=CheckpointStore(
            request.run_dir / "checkpoints",
            group=process.saving,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            keep_every_weights_only=config.checkpoint.keep_every_weights_only,
        ),
        verifier=_make_verifier(request, task, process),
        stop=stop,
    )


def _make_verifier(request: Request, task: Task[Any, Any], process: Process) -> Verifier:
    """Return what compares the data with its digests: on one rank of each host, as each may have its own."""
    files: dict[Path, str] = {}
    for dataset in task.data.datasets if process.info.local_rank == 0 else ():
        files |= dataset.digests
    # The others wait for that rank where a checkpoint does.
    timeout_s = request.config.runtime.timeout_s / 4
    return Verifier(files, request.config.data.verify, request.run_dir, timeout_s)


def _make_replicas(
    request: Request,
    task: Task[Any, Any],
    model: CutModel[Any],
    optimiser: Optimiser,
    process: Process,
    metrics: Metrics,
    stop: Stop,
) -> SynchronousReplicas:
    """Return what the replicas do for each other after a step; reach the others where they are apart."""
    config, weights = task.config, model.named_weights()

    def update_of(named: dict[str, nn.Parameter]) -> Update:
        own = build_optimiser(named, config.optimizer)
        return Update(own.step, lambda: optimiser_tensors(named, own))

    replica = Replica(
        config=config,
        weights=weights,
        update=Update(optimiser.step, lambda: optimiser_tensors(weights, optimiser)),
        update_of=update_of,
        rate_at=lambda step: learning_rate(config, step) / config.optimizer.lr,
        num_replicas=model.mesh.layout.num_replicas,
        rank=process.rank,
        group=request.replica_group,
        fingerprints=[dataset.fingerprint for dataset in task.data.datasets],
        stopped=lambda: bool(stop.reason_here()),
        record=metrics.record_round,
        incidents=request.run_dir / "incidents.jsonl" if process.rank == 0 else None,
    )
    return make_replicas(replica, model.exchange, model.mesh)


def _eval_set(task: Task[Any, Any], name: str) -> EvalSet[Any] | None:
    """Choose the samples of an evaluation; None, and a log line, where the split has none."""
    found = task.eval_set(name)
    if found is None:
        log.info(f"no {name}: {task.data.without(name)}")
    return found
