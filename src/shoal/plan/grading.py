"""The plan of a run: made before it starts, compared with what happened, and asked when memory runs out.

A run's folder holds it as plan.json. Nothing in here loads torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.config.layout import Layout, parse_layout, resolve_layout
from shoal.config.layout_rules import cut_evenly
from shoal.config.load import validate
from shoal.config.sections import Config
from shoal.config.sync_rules import strategy_of
from shoal.data.dataset import open_dataset
from shoal.errors import ConfigError, InputError, ShoalError
from shoal.models.shape import resolve_shape
from shoal.plan.calibration import add_measurement
from shoal.plan.cluster import Cluster, DeviceSpec
from shoal.plan.command import (
    CHOSEN,
    PlanOptions,
    choose,
    clusters_of,
    costs_on,
    plan_layout,
    record_of,
    setting_of,
    shape_of,
)
from shoal.plan.here import this_machine
from shoal.plan.link_cost import Link
from shoal.plan.machine import rates_of
from shoal.plan.memory import CATEGORIES, memory_of
from shoal.plan.search import Plan, check_rules, workload_of
from shoal.plan.show import gigabytes, seconds
from shoal.plan.step_time import PHASES, step_time
from shoal.plan.workload import Workload
from shoal.runtime.files import read_json, write_json

PLAN = "plan.json"
_SKIPPED = 5  # first steps that are not compared: they compile, and fill caches
_MOST_REMEDIES = 3
_SAVING = 0.02  # of the peak, from which a change is a remedy

_MOST_RATIO = 10  # of predicted to measured, from which no error is printed
# What is measured, and the property of RankMemory that predicts it.
_MEMORY = {"allocated_bytes": "allocated", "peak_bytes": "peak_bytes", "reserved_bytes": "reserved_bytes"}
Measured = Mapping[str, int]  # allocated_bytes, peak_bytes, reserved_bytes


def plan_run(config: Config, nproc: int, nnodes: int, *, force: bool = False) -> dict[str, Any] | None:
    """Plan a run on this machine, before it starts; None if there is no plan for it.

    `nproc` ranks train on each host. No plan: networks other than decoders,
    replicas that are worlds of their own, devices that are not in the table, and what the rules reject, which
    training itself says.

    Raises:
        InputError: A rank needs more memory than there is, unless with `force`.
    """
    try:
        layout = resolve_layout(config.parallel, nproc * nnodes)
        if strategy_of(config).apart and layout.num_replicas > 1:
            return None
        shape = shape_of(config, [open_dataset(Path(path)) for path in config.data.datasets])
        cluster = replace(this_machine(config.runtime.device, nproc), nodes=nnodes)
        plan = plan_layout(config, shape, cluster, layout)
    except Exception:  # what cannot be planned can be trained all the same
        return None
    if _cannot_fit(plan) and not force:
        what = "of the device" if cluster.device.kind == "cuda" else "available to each process here"
        fitting = ", or ".join(words for words, other in remedies(plan) if other.fits)
        raise InputError(
            f"{plan} does not fit: a rank needs {gigabytes(plan.memory.total_bytes)} at the peak "
            f"({plan.memory.peak.name}), of {gigabytes(cluster.device.memory_bytes)} {what}",
            hint=f"use {fitting or '`shoal plan`, which searches layouts'}; --force starts all the same",
        )
    return record_of(plan)


def _cannot_fit(plan: Plan) -> bool:
    """Say whether a rank needs more than a device has, or all ranks of a host more than it has."""
    device = plan.workload.cluster.device
    if device.kind == "cuda":
        return not plan.fits
    return statistics.mean(rank.total_bytes for rank in memory_of(plan.workload)) > device.memory_bytes


def choose_layout(config: Config, fixed: set[str], nproc: int) -> Plan:
    """Return the fastest plan that fits on this machine.

    `nproc` 0: all GPUs, or the number of processes that is best for the processor.

    Raises:
        ConfigError: No layout is legal and fits.
    """
    shape = shape_of(config, [open_dataset(Path(path)) for path in config.data.datasets])
    return choose(config, shape, clusters_of(config, PlanOptions(gpus=nproc)), fixed).ranked[0]


def grade(run_dir: Path, lines: Sequence[Mapping[str, Any]], measured: Measured) -> str:
    """Compare the plan of a run with the first steps of rank 0; store and return the comparison.

    `lines` are those of metrics.jsonl. The ratios go into the calibration of later plans.
    """
    stored = read_json(run_dir / PLAN, "plan")
    timed = lines[_SKIPPED:]
    step_s = statistics.median(line["seconds"] for line in timed)
    phases = {name: statistics.median(line[f"{name}_s"] for line in timed) for name in PHASES}
    steps = f"{timed[0]['step']} to {timed[-1]['step']}"
    plan = plan_of(stored, rank=0)
    predicted = {name: getattr(plan.memory, of) for name, of in _MEMORY.items()}
    stored["measured"] = {"steps": steps, "step_s": step_s, "phases": phases, "memory": dict(measured)}
    stored["predicted"] = {"step_s": plan.time.total, "phases": plan.time.phases, "memory": predicted}
    write_json(run_dir / PLAN, stored)
    rows = [*_memory_rows(plan, measured), ("step", plan.time.total, step_s, seconds)]
    rows += [(f"  {name}", plan.time.phases[name], phases[name], seconds) for name in PHASES]
    told = [f"plan compared with steps {steps}:", *_table(rows, floor=0.01 * step_s)]
    try:
        _calibrate(plan.workload, phases, step_s, len(timed))
    except (ShoalError, OSError) as error:
        told.append(f"  not kept for later plans: {error}")
    return "\n".join(told)


def out_of_memory(run_dir: Path, rank: int, measured: Measured) -> str:
    """Return what was predicted and measured when a rank ran out of memory, and the cheapest remedies."""
    plan = plan_of(read_json(run_dir / PLAN, "plan"), rank=rank)
    peak, device = plan.memory.peak, plan.workload.cluster.device
    parts = {name: peak.bytes.get(name, 0) for name in CATEGORIES}
    named = [
        f"{name.replace('_', ' ')} {gigabytes(parts[name])}"
        for name in sorted(parts, key=lambda name: -parts[name])
        if parts[name] > 0.01 * peak.total
    ]
    lines = [
        f"rank {rank} ran out of memory under {plan}; {gigabytes(device.memory_bytes)} were there for it",
        *_table(_memory_rows(plan, measured)),
        f"  predicted at the peak, {peak.name}: {', '.join(named)}",
    ]
    changes = remedies(plan)
    lines += ["the cheapest remedies, with their predicted effect:"] if changes else []
    for words, other in changes:
        saved = gigabytes(plan.memory.total_bytes - other.memory.total_bytes)
        lines.append(f"  {words}: {saved} less, {other.time.total / plan.time.total - 1:+.0%} time a step")
    return "\n".join(lines)


def _calibrate(w: Workload, phases: Mapping[str, float], step_s: float, steps: int) -> None:
    """Let later plans know of the error of the formulas, without what they knew of earlier ones."""
    raw = step_time(w, rates_of(w.cluster.device, w.cluster.per_node, w.dtype))
    add_measurement(
        w.cluster.device.name, w.dtype, raw.phases, phases, seconds=step_s, steps=steps, setting=setting_of(w)
    )


def remedies(plan: Plan) -> list[tuple[str, Plan]]:
    """Return changes that save memory, those that fit first, then the cheapest in time; one for a setting."""
    w = plan.workload
    costs = costs_on(w.cluster, w.dtype)
    found = []
    for words, layout, train, offload in _changes(plan):
        workload = workload_of(w.config, layout, w.shape, w.cluster, w.dtype, train, offload=offload)
        try:
            check_rules(workload.config, layout, w.shape)
        except ConfigError:
            continue
        other = Plan(workload, costs.memory(workload), costs.time(workload))
        if other.memory.total_bytes < (1 - _SAVING) * plan.memory.total_bytes:
            found.append((words, other))
    chosen: dict[str, tuple[str, Plan]] = {}
    for words, other in sorted(found, key=lambda one: (not one[1].fits, one[1].time.total)):
        chosen.setdefault(words.partition(" = ")[0], (words, other))
    return list(chosen.values())[:_MOST_REMEDIES]


def plan_of(stored: Mapping[str, Any], rank: int) -> Plan:
    """Return the plan that `record_of` has stored, with the memory of one rank."""
    config = validate(stored["config"], PLAN)
    device = DeviceSpec(**stored["cluster"]["device"])
    links = {name: Link(**stored["cluster"][name]) for name in ("inside", "across")}
    cluster = Cluster(device, stored["cluster"]["per_node"], stored["cluster"]["nodes"], **links)
    layout = parse_layout(stored["layout"])
    plan = plan_layout(config, resolve_shape(config.model, stored["vocab_size"]), cluster, layout)
    return replace(plan, memory=memory_of(plan.workload)[rank // (layout.dp * layout.tp)])


def settings_of_choice(plan: Plan, given: Config) -> dict[str, dict[str, Any]]:
    """Return the settings that a search has chosen beside the layout, by section.

    A split that was given, for another number of stages, is replaced by an even one.
    """
    w, split = plan.workload, plan.workload.config.parallel.split
    train = {name: getattr(w.config.train, name) for name in CHOSEN["train"]}
    if given.parallel.split and not split:
        split = tuple(cut_evenly(w.shape.n_layers, w.layout.stages))
    return {"train": train, "parallel": {"offload": w.config.parallel.offload, "split": split}}


def _changes(plan: Plan) -> Iterator[tuple[str, Layout, dict[str, Any], bool]]:
    """Yield changes of a setting or two: words, layout, settings of train, offload."""
    w, layout, train = plan.workload, plan.workload.layout, plan.workload.config.train
    offload = w.config.parallel.offload
    smaller = [n for n in range(1, train.micro_batch_size) if train.micro_batch_size % n == 0]
    for size in {smaller[-1], 1} if smaller else ():
        yield f"train.micro_batch_size = {size}", layout, {"micro_batch_size": size}, offload
    for recompute in ("selective", "full"):
        if train.recompute != recompute and train.recompute != "full":
            yield f"train.recompute = {recompute}", layout, {"recompute": recompute}, offload
    for zero in range(max(1, layout.zero + 1), 4) if layout.dp > 1 else ():
        other = replace(layout, zero=zero, dp_replicate=1, dp_shard=layout.dp) if not layout.zero else layout
        yield f"parallel.zero = {zero}", replace(other, zero=zero), {}, offload
    if layout.tp > 1 and not layout.sequence:
        yield "parallel.sequence = true", replace(layout, sequence=True), {}, offload
    if layout.zero and not offload:
        yield "parallel.offload = true", layout, {}, True


def _memory_rows(plan: Plan, measured: Measured) -> list[tuple[str, float, float, Any]]:
    return [
        (f"{name.removesuffix('_bytes')} memory", getattr(plan.memory, of), measured[name], gigabytes)
        for name, of in _MEMORY.items()
        if name in measured
    ]


def _table(rows: list[tuple[str, float, float, Any]], floor: float = 0.0) -> list[str]:
    """Return lines of predicted, measured and the ratio; what is below a floor in both is left out."""
    lines = [f"  {'':<18} {'predicted':>12} {'measured':>12}"]
    for name, predicted, found, words in rows:
        if max(predicted, found) > floor:
            error = f"{predicted / found - 1:+7.0%}" if 0 < predicted < _MOST_RATIO * found else ""
            lines.append(f"  {name:<18} {words(predicted):>12} {words(found):>12} {error}")
    return lines
