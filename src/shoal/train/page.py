"""The page at the start of a run: what will happen, in numbers."""

from __future__ import annotations

from shoal.config import rules
from shoal.config.load import differences
from shoal.config.sections import Config
from shoal.models.counts import count_parameters
from shoal.parallel.tensor import local
from shoal.runtime.device import has_fast_products
from shoal.runtime.log import log
from shoal.train.job import Job
from shoal.train.schedule import horizon, warmup_steps


def print_page(job: Job) -> None:
    """Log layout, model, data, batch and schedule, and each setting that differs from its default."""
    rows = [*_machine(job), *_model(job), *_batch(job), *_schedule(job)]
    width = max(len(name) for name, _ in rows)
    log.info("\n".join(f"  {name:<{width}}  {value}" for name, value in rows))
    changed = [
        f"{name} = {value}"
        for name, value, _ in differences(job.config, Config())
        if name not in ("data.datasets", "model.vocab_size")
    ]
    if not has_fast_products(job.precision.dtype, job.process.device.torch_device):
        log.warning(
            f"warning: {job.precision.name} matrix products are not in this CPU's hardware: "
            "they run some 50 times slower than fp32"
        )
    log.info("  settings that differ from their defaults: " + ("; ".join(changed) or "none"))


def _machine(job: Job) -> list[tuple[str, str]]:
    process, layout = job.process, job.model.mesh.layout
    accumulation = rules.grad_accum_steps(job.config, layout.dp)
    return [
        ("run", str(job.run_dir)),
        (
            "layout",
            f"{layout}: {process.world_size} process(es), {accumulation} micro-step(s) of "
            f"{job.config.train.micro_batch_size} sequence(s) each",
        ),
        ("device", f"{process.device.name}, {job.precision.name}"),
        ("threads", f"{process.threads} per worker ({process.threads_reason})"),
    ]


def _model(job: Job) -> list[tuple[str, str]]:
    shape, counts = job.shape, count_parameters(job.shape)
    own = sum(local(weight).numel() for weight in job.model.named_weights().values())
    return [
        ("model", f"{shape.style}: {shape.n_layers} layers x {shape.d_model} wide x {shape.n_heads} heads"),
        ("parameters", f"{counts.total:,} in all, {own:,} on rank 0"),
        (
            "vocabulary",
            f"{shape.vocab_size:,}, padded to {shape.padded_vocab_size:,}; "
            f"end of document {job.datasets[0].eod_id}",
        ),
    ]


def _batch(job: Job) -> list[tuple[str, str]]:
    loader, train = job.task.loader, job.config.train
    tokens = train.global_batch_size * train.seq_len
    return [
        ("data", ", ".join(f"{d.path} ({d.fingerprint[:12]})" for d in job.datasets)),
        (
            "epoch",
            f"{loader.windows.total:,} windows of {train.seq_len} tokens = "
            f"{loader.steps_per_epoch:,.1f} steps; "
            f"{loader.windows.tail_tokens:,} tokens at the ends fill no window",
        ),
        ("step", f"{train.global_batch_size} sequences = {tokens:,} tokens"),
        (
            "in all",
            f"{train.steps:,} steps = {train.steps * tokens:,} tokens = "
            f"{train.steps / loader.steps_per_epoch:.2f} epochs",
        ),
    ]


def _schedule(job: Job) -> list[tuple[str, str]]:
    config = job.config
    return [
        (
            "schedule",
            f"{config.schedule.kind}: {warmup_steps(config)} warm-up steps to lr {config.optimizer.lr:g}, "
            f"down to {config.schedule.min_lr:g} at step {horizon(config)}",
        ),
        ("optimiser", config.optimizer.name),
        ("compile", f"{'yes' if job.compilation.on else 'no'} ({job.compilation.reason})"),
        ("recompute", _recompute(job)),
    ]


def _recompute(job: Job) -> str:
    train, layers = job.config.train, job.shape.n_layers
    if train.recompute != "full":
        return train.recompute
    chunk = min(train.recompute_layers, layers)
    whole, rest = divmod(layers, chunk)
    last = f" and one of {rest}: train.recompute_layers does not divide {layers} layers" if rest else ""
    return f"full, {whole} chunk(s) of {chunk} layer(s){last}"
