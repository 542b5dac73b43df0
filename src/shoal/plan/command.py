"""`shoal plan`: does it fit, how long does it take, which layout, and why not the others."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.config.layout import Layout, parse_layout
from shoal.config.load import config_from_toml, read_toml, to_toml, toml_value
from shoal.config.sections import Config
from shoal.data.dataset import Dataset, open_dataset
from shoal.errors import EXIT_DONE, EXIT_FAILED, ConfigError, InputError, counted
from shoal.models.counts import count_parameters, flops_per_token
from shoal.models.shape import ModelShape, resolve_shape
from shoal.plan import show
from shoal.plan.calibration import calibrated
from shoal.plan.cluster import Cluster, load_cluster
from shoal.plan.here import gpu_names, this_machine
from shoal.plan.machine import rates_of
from shoal.plan.memory import worst
from shoal.plan.search import Costs, Found, Plan, check_rules, search, smallest_change, workload_of
from shoal.plan.step_time import StepTime, run_cost, step_time
from shoal.plan.workload import Workload
from shoal.runtime.cores import physical_cores
from shoal.runtime.files import check_targets, write_json, write_text
from shoal.runtime.startup import loading

_GPT2_IDS = 50257  # vocabulary without a dataset
CHOSEN = {  # what a search decides, and `apply` writes, by section
    "parallel": ("tp", "pp", "zero", "dp_shard", "sequence", "schedule", "offload", "split"),
    "train": ("micro_batch_size", "recompute", "recompute_offload"),
}


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command line, besides the configuration."""

    epochs: float | None = None
    tokens: float | None = None
    gpus: int = 0  # of a node, or of this machine
    gpu: str | None = None
    nodes: int = 0
    link: str | None = None
    cluster: Path | None = None
    layout: str | None = None
    measure: bool = False
    simulate: bool = False
    apply: Path | None = None
    json: Path | None = None
    plot: Path | None = None


def command(config: Config, name: str, options: PlanOptions, fixed: Collection[str] = ()) -> int:
    """Print the plan of a configuration, called `name`; `fixed` are settings that a search may not change.

    Exit status: 0 it fits, 1 it does not.
    """
    _check(options)
    datasets = [open_dataset(Path(path)) for path in config.data.datasets]
    shape = shape_of(config, datasets)
    config = _with_length(config, options, datasets)
    if options.measure:
        with loading():
            from shoal.plan.measure_machine import measure

        measure()
    found: Found | None = None
    if options.layout is not None:
        clusters = clusters_of(config, options, parse_layout(options.layout).world_size)
        plan = plan_layout(config, shape, clusters[0], parse_layout(options.layout))
    else:
        clusters = clusters_of(config, options)
        found = choose(config, shape, clusters, fixed)
        plan = found.ranked[0]
    cost = run_cost(plan.workload, plan.time)
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    show.answer(console, name, plan, cost)
    if not datasets and not config.model.vocab_size:
        console.print(f"vocabulary of GPT-2, {_GPT2_IDS:,} ids; --data DATASET takes that of a dataset")
    show.plan(console, plan, cost)
    if found is not None:
        show.found(console, found)
    if options.simulate:
        show.simulation(console, plan)
    if options.json is not None:
        write_json(
            options.json, record_of(plan) | {"run": asdict(cost)} | (show.record(found) if found else {})
        )
    if options.plot is not None:
        show.draw(plan, name, options.plot)
    if options.apply is not None:
        apply(plan.workload.config, options.apply)
        console.print(_how_to_train(plan, options.apply), soft_wrap=True, markup=False)
    return EXIT_DONE if plan.fits else EXIT_FAILED


def _how_to_train(plan: Plan, path: Path) -> str:
    """Return the command that trains with a file into which a choice was written."""
    if not plan.fits:
        return f"written to {path}, although it does not fit"
    cluster = plan.workload.cluster
    words = f"shoal train {path} --nproc {cluster.per_node}"
    if cluster.nodes == 1:
        return f"written; train with: {words}"
    return (
        f"written; train with, on each of the {cluster.nodes} nodes, where HOST is the first: "
        f"{words} --nnodes {cluster.nodes} --rdzv HOST:29500"
    )


def shape_of(config: Config, datasets: Sequence[Dataset]) -> ModelShape:
    """Resolve the shape of a decoder; without data, or a vocabulary of its own, it has GPT-2's.

    Raises:
        ConfigError: Another network is described.
    """
    if config.model.network != "decoder":
        raise ConfigError(
            f"model.network = {config.model.network}: decoders alone are planned",
            hint="measure it with `shoal bench networks`",
        )
    return resolve_shape(
        config.model, datasets[0].vocab_size if datasets else config.model.vocab_size or _GPT2_IDS
    )


def clusters_of(config: Config, options: PlanOptions, world_size: int = 0) -> list[Cluster]:
    """Return the cluster of the options; where none is named, this machine.

    On a processor without a given number of processes, there is a choice of several numbers.
    """
    if options.cluster is not None or options.gpu is not None:
        given = options.gpus or max(1, world_size // max(1, options.nodes))
        cluster = load_cluster(given, options.gpu or "", options.nodes, options.link, options.cluster)
        if world_size and cluster.world_size != world_size:
            raise InputError(
                f"--layout {options.layout} is for {counted(world_size, 'device')}, and the cluster has "
                f"{cluster.world_size}",
                hint="name a layout for that many, or leave --layout or --gpus out",
            )
        return [cluster]
    if options.nodes or options.link:
        raise InputError("--nodes and --link need the device", hint="name it with --gpu, as in --gpu h100")
    count = world_size or options.gpus
    if count or (config.runtime.device != "cpu" and gpu_names()):
        return [this_machine(config.runtime.device, count)]
    cores = physical_cores()
    return [this_machine("cpu", n) for n in range(1, cores + 1) if cores % n == 0]


def dtype_on(config: Config, cluster: Cluster) -> str:
    """Return the number format of matrix products on a device."""
    given = config.precision.dtype
    return given if given != "auto" else "bf16" if "bf16" in cluster.device.flops else "fp32"


def costs_on(cluster: Cluster, dtype: str, *, of_setting: bool = False) -> Costs:
    """Return the formulas with what is known of a device: measured rates, and the errors of earlier plans.

    With `of_setting`, errors of the same configuration and layout count before others; a search asks for none
    of these, as they would make one candidate differ from its neighbours.
    """
    rates = rates_of(cluster.device, cluster.per_node, dtype)

    def time(workload: Workload) -> StepTime:
        step = step_time(workload, rates)
        return calibrated(
            step, cluster.device.name, dtype, setting=setting_of(workload) if of_setting else ""
        )

    return Costs(worst, time)


def setting_of(workload: Workload) -> str:
    """Name what a step computes and how, for the calibration."""
    shape, train = workload.shape, workload.config.train
    model = f"{shape.style} {shape.n_layers}x{shape.d_model}x{shape.padded_vocab_size}"
    batch = f"{train.global_batch_size}/{train.micro_batch_size}x{train.seq_len}"
    return f"{model} {batch} {workload.layout} {train.recompute} on {workload.cluster.world_size}"


def plan_layout(config: Config, shape: ModelShape, cluster: Cluster, layout: Layout) -> Plan:
    """Cost one layout.

    Raises:
        ConfigError: It breaks a rule.
    """
    dtype = dtype_on(config, cluster)
    offload = config.parallel.offload and layout.zero > 0
    workload = workload_of(config, layout, shape, cluster, dtype, offload=offload)
    check_rules(workload.config, layout, shape)
    costs = costs_on(cluster, dtype, of_setting=True)
    return Plan(workload, costs.memory(workload), costs.time(workload))


def choose(config: Config, shape: ModelShape, clusters: Sequence[Cluster], fixed: Collection[str]) -> Found:
    """Search the layouts of one cluster, or of each of several; the fastest comes first.

    Raises:
        ConfigError: No layout is legal and fits, with the reason for most, and what would admit one.
    """
    fixed = {f"{section}.{name}" for section, names in CHOSEN.items() for name in names} & set(fixed)
    all_found = []
    for cluster in clusters:
        dtype = dtype_on(config, cluster)
        costs = costs_on(cluster, dtype)
        all_found.append(search(config, shape, cluster, dtype, fixed=fixed, costs=costs))
    best = min(all_found, key=lambda one: one.ranked[0].time.total if one.ranked else math.inf)
    if best.ranked:
        others = [plan for found in all_found if found is not best for plan in found.ranked[:1]]
        ranked = sorted([*best.ranked, *others], key=lambda plan: plan.time.total)
        return replace(best, ranked=ranked)
    rejected = all_found[-1].rejected
    if not rejected:
        raise ConfigError(
            f"no layout of {counted(cluster.world_size, 'device')} has the settings that are given",
            hint="leave parallel.* to the planner, or plan for more devices",
        )
    reason = rejected[0]
    raise ConfigError(
        f"no layout of {counted(cluster.world_size, 'device')} is legal and fits: {reason.sentence} "
        f"({reason.count} of {all_found[-1].num_rejected} layouts)",
        hint=smallest_change(config, shape, cluster, dtype, fixed=fixed, costs=costs),
    )


def record_of(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values, for plan.json."""
    w, counts = plan.workload, count_parameters(plan.workload.shape)
    return {
        "layout": str(w.layout),
        "settings": str(plan),
        "fits": plan.fits,
        "config": w.config.model_dump(mode="json"),
        "vocab_size": w.shape.vocab_size,
        "cluster": asdict(w.cluster),
        "dtype": w.dtype,
        "parameters": asdict(counts) | {"total": counts.total, "a_rank": show.own_parameters(plan)},
        "flops_per_token": flops_per_token(w.shape, w.config.train.seq_len),
        "memory": {
            "pp_rank": plan.memory.pp_rank,
            "total_bytes": plan.memory.total_bytes,
            "allocated_bytes": plan.memory.allocated,
            "peak_bytes": plan.memory.peak_bytes,
            "reserved_bytes": plan.memory.reserved_bytes,
            "peak": asdict(plan.memory.peak),
            "moments": [asdict(moment) for moment in plan.memory.moments],
        },
        "time": {"step_s": plan.time.total, "phases": plan.time.phases, "mfu": plan.time.mfu},
        "tokens_per_s": plan.time.tokens_per_s,
    }


def apply(config: Config, path: Path) -> None:
    """Write the chosen settings into a TOML file; other lines stay. A new file gets all given settings.

    Raises:
        InputError: The file is laid out in a way that cannot be edited line by line.
    """
    if not path.exists():
        write_text(path, to_toml(config, given_only=True))
        return
    text = read_toml(path)
    wanted = [
        (section, name, getattr(getattr(config, section), name))
        for section, names in CHOSEN.items()
        for name in names
    ]
    if config_from_toml(text, str(path)).parallel.split == config.parallel.split:
        wanted.remove(("parallel", "split", config.parallel.split))
    for section, name, value in wanted:
        text = _with_setting(text, section, name, toml_value(value))
    try:
        found = config_from_toml(text, str(path))
        edited = all(getattr(getattr(found, section), name) == value for section, name, value in wanted)
    except ConfigError:
        edited = False
    if not edited:
        lines = "; ".join(f"{section}.{name} = {toml_value(value)}" for section, name, value in wanted)
        raise InputError(f"{path} cannot be edited line by line", hint=f"write these by hand: {lines}")
    write_text(path, text)


def _with_setting(text: str, section: str, name: str, value: str) -> str:
    """Return TOML in which a section has a setting: its line is replaced, or added below the heading."""
    heading = re.search(rf"(?m)^\s*\[\s*{section}\s*\].*$", text)
    if heading is None:
        return f"{text.rstrip()}\n\n[{section}]\n{name} = {value}\n".lstrip("\n")
    start = heading.end()
    following = re.search(r"(?m)^\s*\[", text[start:])
    end = start + following.start() if following else len(text)
    line = rf"(?m)^(\s*{name}\s*=\s*)(\"[^\"]*\"|'[^']*'|\[[^\]]*\]|[\w.+-]+)"
    body, count = re.subn(line, lambda old: old[1] + value, text[start:end], count=1)
    return text[:start] + (body if count else f"\n{name} = {value}{text[start:end]}") + text[end:]


def _check(options: PlanOptions) -> None:
    for name, value in (("epochs", options.epochs), ("tokens", options.tokens)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(
                f"--{name} {value:g}: must be above 0", hint=f"leave --{name} out for train.steps"
            )
    if options.epochs is not None and options.tokens is not None:
        raise InputError("--epochs and --tokens set the same value", hint="leave one of the two out")
    described = [name for name in ("gpu", "gpus", "nodes", "link") if getattr(options, name)]
    if options.cluster is not None and described:
        raise InputError(
            f"--cluster and --{described[0]} both describe the cluster",
            hint=f"leave --{described[0]} out, and write it into {options.cluster}",
        )
    for name, number in (("gpus", options.gpus), ("nodes", options.nodes)):
        if number < 0:
            raise InputError(f"--{name} {number}: must be at least 1", hint=f"for example --{name} 8")
    check_targets(options.json, options.plot, options.apply)


def _with_length(config: Config, options: PlanOptions, datasets: Sequence[Dataset]) -> Config:
    """Return the configuration with the steps that epochs or tokens take."""
    train = config.train
    if options.epochs is not None:
        if not datasets:
            raise InputError("--epochs needs a dataset", hint="name it with --data, or give --tokens")
        splits = (dataset.split("train") for dataset in datasets)
        windows = sum((split.num_tokens - 1) // train.seq_len for split in splits if split is not None)
        steps = options.epochs * windows / train.global_batch_size
    elif options.tokens is not None:
        steps = options.tokens / (train.global_batch_size * train.seq_len)
    else:
        return config
    return config.model_copy(update={"train": train.model_copy(update={"steps": max(1, math.ceil(steps))})})
