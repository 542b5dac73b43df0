"""The one place where a training job is put together. Everything it holds is made here and named once."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from torch import nn

from shoal.checkpoint.store import CheckpointStore
from shoal.config.load import to_toml
from shoal.config.sections import Config, Runtime
from shoal.config.sync_rules import strategy_of
from shoal.data.verify import Verifier
from shoal.gradsync.after_step import InStep, Update
from shoal.gradsync.async_sgd import AsyncSgd, Pace
from shoal.gradsync.held_back import HeldBack
from shoal.gradsync.meeting import Meeting
from shoal.gradsync.rounds import OuterRounds
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
from shoal.train.metrics import Metrics
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
    sync: InStep
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
    first = layout.dp * (request.island.replica if request.island else 0)
    place = first + mesh.dp_rank, layout.batch_parts, layout.islands
    task.begin(*place, device, precision.autocast, cross_entropy)
    model = apply(task, mesh, process, config, compilation, axis, clock.phase)
    metrics = Metrics(request.run_dir, task, process, precision, clock, layout.islands)
    optimiser = build_optimiser(model.updated_weights(), config.optimizer)
    return Job(
        request=request,
        config=config,
        process=process,
        task=task,
        model=model,
        sync=model.owners or _make_sync(request, task, model, optimiser, process, metrics, stop),
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
    for dataset in task.data.datasets if process.seat.local_rank == 0 else ():
        files |= dataset.digests
    # The others wait for that rank where a checkpoint does.
    timeout_s = request.config.runtime.timeout_s / 4
    return Verifier(files, request.config.data.verify, request.run_dir, timeout_s)


def _make_sync(
    request: Request,
    task: Task[Any, Any],
    model: CutModel[Any],
    optimiser: Optimiser,
    process: Process,
    metrics: Metrics,
    stop: Stop,
) -> InStep:
    """Return what the replicas do for each other after a step; reach the others where they are apart."""
    config, layout, island = task.config, model.mesh.layout, request.island
    if not strategy_of(config).apart:
        return HeldBack(model.exchange, model.mesh, config.parallel.split)
    assert island is not None or layout.replicas == 1, layout  # `shoal train` refuses others
    meeting = None
    if island is not None:
        same = {"runtime": Runtime(), "data": config.data.model_copy(update={"datasets": ()})}
        facts = [to_toml(config.model_copy(update=same)), *(data.fingerprint for data in task.data.datasets)]
        facts += [importlib.metadata.version(name) for name in ("shoal", "torch")]
        plan = xxhash.xxh3_128_hexdigest("\n".join(facts).encode())
        patience_s, slow_link = config.runtime.timeout_s, config.runtime.slow_link
        meeting = Meeting(island, process.rank, plan, patience_s, slow_link, lambda: bool(stop.reason_here()))
    if config.sync.strategy == "async_sgd":
        return _make_async(config, model, optimiser, island.replica if island else 0, meeting)
    return OuterRounds(
        model.named_weights(),
        config.sync,
        steps=config.train.steps,
        rate_at=lambda step: learning_rate(config, step) / config.optimizer.lr,
        inner=Update(optimiser.step, lambda: optimiser_tensors(model.named_weights(), optimiser)),
        replicas=layout.replicas,
        meeting=meeting,
        record=metrics.record_round,
        incidents=request.run_dir / "incidents.jsonl" if process.rank == 0 else None,
    )


def _make_async(
    config: Config, model: CutModel[Any], optimiser: Optimiser, rank: int, meeting: Meeting | None
) -> AsyncSgd:
    def update_of(named: dict[str, nn.Parameter]) -> Update:
        own = build_optimiser(named, config.optimizer)
        return Update(own.step, lambda: optimiser_tensors(named, own))

    weights = model.named_weights()
    return AsyncSgd(
        weights,
        lambda: optimiser_tensors(weights, optimiser),
        update_of,
        Pace(config.sync.staleness, config.checkpoint.every, config.train.steps, config.runtime.stop_after),
        rank,
        model.mesh.layout.replicas,
        meeting,
    )


def _eval_set(task: Task[Any, Any], name: str) -> EvalSet[Any] | None:
    """Choose the samples of an evaluation; None, and a log line, where the split has none."""
    found = task.eval_set(name)
    if found is None:
        log.info(f"no {name}: {task.data.without(name)}")
    return found
