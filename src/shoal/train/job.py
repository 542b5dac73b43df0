"""The one place where a training job is put together. Everything it holds is made here and named once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.store import CheckpointStore
from shoal.config.layout import resolve_layout
from shoal.config.sections import Config
from shoal.data.dataset import Dataset, TokenSplit
from shoal.data.loader import Loader, Windows
from shoal.gradsync.after_step import InStep
from shoal.models.loss import CrossEntropy
from shoal.models.shape import ModelShape, resolve_shape
from shoal.parallel.apply import CutModel, apply
from shoal.parallel.compile import Compilation, decide
from shoal.parallel.tensor import Axis, VocabularyPart
from shoal.runtime.compiler import keep_compiled_in
from shoal.runtime.log import log
from shoal.runtime.mesh import Mesh, make_mesh
from shoal.runtime.process import Process
from shoal.runtime.stop import Stop
from shoal.tasks.gpt import EvalSet, Gpt, MicroBatch
from shoal.train.clock import StepClock
from shoal.train.guard import LossGuard
from shoal.train.metrics import Metrics
from shoal.train.optimiser import Optimiser, build_optimiser
from shoal.train.precision import Precision
from shoal.train.profiler import StepProfiler
from shoal.train.request import Request


@dataclass
class Job:
    """A training job on one rank."""

    request: Request
    config: Config  # resolved: the vocabulary is the dataset's
    process: Process
    datasets: list[Dataset]
    shape: ModelShape
    task: Gpt
    model: CutModel[MicroBatch]
    sync: InStep
    compilation: Compilation
    optimiser: Optimiser
    precision: Precision
    validation: EvalSet | None
    test: EvalSet | None
    guard: LossGuard
    clock: StepClock
    metrics: Metrics
    profiler: StepProfiler
    checkpoints: CheckpointStore
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
    datasets = request.check(process.world_size)
    shape = resolve_shape(request.config.model, datasets[0].vocab_size)
    config = _with_vocabulary(request.config, shape.vocab_size)
    layout = resolve_layout(config.parallel, process.world_size)
    mesh = make_mesh(process, layout, config.runtime.timeout_s)
    device = process.device.torch_device
    precision = Precision(config.precision, device)
    compilation = decide(config, shape, process)
    if compilation.on:
        keep_compiled_in(request.run_dir / "compiled")
    clock = StepClock(process.device)
    axis = Axis(mesh["tp"], clock.phase) if layout.tp > 1 else None
    columns = VocabularyPart(axis, shape.padded_vocab_size) if axis else None
    task = Gpt(
        _make_loader(config, datasets, mesh),
        seed=config.train.seed,
        micro_batch_size=config.train.micro_batch_size,
        device=device,
        autocast=precision.autocast,
        cross_entropy=CrossEntropy(columns, compiled=compilation.on),
        reset_after=datasets[0].eod_id if config.data.reset_documents else None,
    )
    model = apply(shape, mesh, process, config, compilation, axis, task, clock.phase)
    return Job(
        request=request,
        config=config,
        process=process,
        datasets=datasets,
        shape=shape,
        task=task,
        model=model,
        sync=model.owners or InStep(),
        optimiser=build_optimiser(model.updated_weights(), config.optimizer),
        compilation=compilation,
        precision=precision,
        validation=_eval_set(config, datasets, "validation"),
        test=_eval_set(config, datasets, "test"),
        guard=LossGuard(config.guard, request.run_dir / "incidents.jsonl" if process.rank == 0 else None),
        clock=clock,
        metrics=Metrics(request.run_dir, config, shape, process, precision, clock),
        profiler=StepProfiler(config.train.profile, request.run_dir, process.rank, clock),
        checkpoints=CheckpointStore(
            request.run_dir / "checkpoints",
            group=process.saving,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            keep_every_weights_only=config.checkpoint.keep_every_weights_only,
        ),
        stop=stop,
    )


def _with_vocabulary(config: Config, vocab_size: int) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocab_size})})


def _make_loader(config: Config, datasets: list[Dataset], mesh: Mesh) -> Loader:
    return Loader(
        Windows(_splits(datasets, "train"), config.train.seq_len),
        weights=config.data.weights,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        rank=mesh.dp_rank,
        world_size=mesh.layout.dp,
    )


def _eval_set(config: Config, datasets: list[Dataset], name: str) -> EvalSet | None:
    """Choose the windows of an evaluation; None, and a log line, where the split has too few tokens."""
    windows = Windows(_splits(datasets, name), config.eval.seq_len or config.train.seq_len)
    if not windows.total:
        held = sum(split.num_tokens for split in windows.splits)
        log.info(f"no {name}: the split holds {held} tokens, fewer than one window of {windows.seq_len + 1}")
        return None
    sequences = min(config.eval.sequences, windows.total)
    return EvalSet(windows, sequences, config.eval.batch_size or config.train.micro_batch_size)


def _splits(datasets: list[Dataset], name: str) -> list[TokenSplit]:
    return [split for dataset in datasets if (split := dataset.split(name)) is not None]
