"""The run summary: what will happen, in numbers."""

from __future__ import annotations

from shoal.config import rules
from shoal.config.load import differences
from shoal.config.sections import Config
from shoal.config.sync_rules import strategy_of
from shoal.errors import counted
from shoal.models.shape import ModelShape
from shoal.parallel.compile import Compilation
from shoal.runtime.device import has_fast_products
from shoal.runtime.log import log
from shoal.train.console import short_path, table
from shoal.train.job import Job
from shoal.train.schedule import horizon, min_lr, warmup_steps

# Shown without --verbose, too.
_SHORT = ("run", "layout", "sync", "device", "model", "parameters", "data", "step", "in all", "schedule")


def print_summary(job: Job) -> None:
    """Log layout, model, data, batch and schedule; as details the rest, and settings that are no defaults."""
    rows = [*_machine(job), *_model(job), *_batch(job), *_schedule(job)]
    changed = [
        f"{name} = {value}"
        for name, value, _ in differences(job.config, Config())
        if name not in ("data.datasets", "model.vocab_size")
    ]
    if not has_fast_products(job.precision.dtype, job.process.device.torch_device):
        log.warning(
            f"warning: {job.precision.name} matrix products are not in this CPU's hardware: large ones run "
            "some 50 times slower than with precision.dtype = fp32"
        )
    rows.append(("settings", "; ".join(changed) or "none differs from its default"))
    log.info(table([row for row in rows if row[0] in _SHORT], verbose=False))
    log.debug(table([row for row in rows if row[0] not in _SHORT], verbose=True))


def _machine(job: Job) -> list[tuple[str, str]]:
    process, layout = job.process, job.model.mesh.layout
    accumulation = rules.grad_accum_steps(job.config, layout.batch_parts)
    return [
        ("run", short_path(job.run_dir)),
        (
            "layout",
            f"{layout}: {counted(process.world_size, 'process')}, "
            f"{counted(accumulation, 'micro-step')} of "
            f"{counted(job.config.train.micro_batch_size, job.task.data.sample)} each",
        ),
        *_sync(job),
        ("device", f"{process.device.name}, {job.precision.name}"),
        ("threads", f"{process.threads} per worker ({process.threads_reason})"),
    ]


def _sync(job: Job) -> list[tuple[str, str]]:
    sync, replicas = job.config.sync, job.model.mesh.layout.num_replicas
    if not strategy_of(job.config).apart:
        return []
    if sync.strategy == "async_sgd":
        ahead = f"the fastest at most {sync.staleness} steps ahead"
        return [("sync", f"{sync.strategy}: {replicas} workers that serve each other, {ahead}")]
    return [("sync", f"{sync.strategy}: {replicas} replicas agree on weights every {sync.every} steps")]


def _model(job: Job) -> list[tuple[str, str]]:
    model, *more = job.task.model_rows()
    return [
        model,
        ("parameters", f"{job.task.num_parameters:,} in all, {job.model.own_parameters:,} on rank 0"),
        *more,
    ]


def _batch(job: Job) -> list[tuple[str, str]]:
    datasets = job.task.data.datasets
    return [
        ("data", ", ".join(short_path(dataset.path) for dataset in datasets)),
        ("fingerprints", ", ".join(dataset.fingerprint[:12] for dataset in datasets)),
        ("verify", job.verifier.plan),
        *job.task.data.rows(job.task.loader),
    ]


def _schedule(job: Job) -> list[tuple[str, str]]:
    config = job.config
    kind, end = config.schedule.kind, f"{min_lr(config):g} at step {horizon(config)}"
    after = f"down to {end}" if kind in ("cosine", "linear", "wsd") else "then as its rule has it"
    return [
        (
            "schedule",
            f"{kind}: {warmup_steps(config)} warm-up steps to lr {config.optimizer.lr:g}, "
            f"{'then constant' if kind == 'constant' else after}",
        ),
        ("optimiser", config.optimizer.name),
        *([("guard", "judges a step while the next one runs")] if config.guard.late else []),
        ("compile", _compiled(job.compilation)),
        *(_recompute(job.config, job.task.shape) if job.task.shape else ()),
    ]


def _compiled(compilation: Compilation) -> str:
    what = "yes" if compilation.on else "the loss alone" if compilation.loss else "no"
    return f"{what} ({compilation.reason})"


def _recompute(config: Config, shape: ModelShape) -> list[tuple[str, str]]:
    train, layers = config.train, shape.n_layers
    if train.recompute != "full":
        return [("recompute", train.recompute)]
    chunk = min(train.recompute_layers, layers)
    whole, rest = divmod(layers, chunk)
    last = f" and one of {rest}: train.recompute_layers does not divide {layers} layers" if rest else ""
    where = ", their inputs in host memory" if train.recompute_offload else ""
    return [("recompute", f"full, {counted(whole, 'chunk')} of {counted(chunk, 'layer')}{last}{where}")]
