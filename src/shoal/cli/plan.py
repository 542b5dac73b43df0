"""`shoal plan`: arguments and help. Loaded on demand, as it imports the settings."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.train import Settings, collect
from shoal.config.load import load_config


def plan(
    config: str,
    /,
    *,
    data: tuple[Path, ...] = (),
    epochs: float | None = None,
    tokens: float | None = None,
    gpus: int = 0,
    gpu: str | None = None,
    nodes: int = 0,
    link: str | None = None,
    cluster: Path | None = None,
    layout: str | None = None,
    measure: bool = False,
    simulate: bool = False,
    apply: Path | None = None,
    json: Path | None = None,
    plot: Path | None = None,
    settings: Settings = None,
) -> int:
    """Plan a run: does it fit, how long does it take, which layout, and why not the others.

    Parameters
    ----------
    config
        Preset (tiny, gpt2, llama-160m, ...) or TOML file.
    data
        Dataset folders made by `shoal prepare`, for the vocabulary and for --epochs.
    epochs
        Passes over the data to plan for (default: train.steps).
    tokens
        Tokens to plan for, such as 3e11 (default: train.steps).
    gpus
        Devices, or with --nodes devices per node; without --gpu, GPUs or processes of this machine.
    gpu
        Device, such as h100 or a100-80 (default: those of this machine, or its processor).
    nodes
        Number of nodes (default: as many as --gpus fill).
    link
        Bandwidth of a device to another node, such as 400gbit, or with a latency, by default the table's:
        10gbit,50us.
    cluster
        TOML file that describes the cluster, in place of the four options above; see docs/planner.md.
    layout
        Layout to plan, such as dp4 or tp2*zero2x4 (default: the fastest one that fits).
    measure
        Measure this machine for two minutes first; the result is stored, and used by later plans.
    simulate
        Check the memory by running a step of the model and its layout on tensors without storage.
    apply
        TOML file to write the choice into; made if it does not exist.
    json
        JSON file for the plan, the ranked layouts and the reasons for rejecting others.
    plot
        PNG file for a plot of the memory over a step, by category.
    settings
        Any setting of the configuration, as --section.field VALUE; overrides the file. A setting of a layout,
        train.micro_batch_size and train.recompute are kept where they are given here.
    """
    overrides = collect(settings, data)
    from shoal.plan.command import PlanOptions, command

    options = PlanOptions(
        epochs, tokens, gpus, gpu, nodes, link, cluster, layout, measure, simulate, apply, json, plot
    )
    fixed = {f"{section}.{name}" for section, values in overrides.items() for name in values}
    return command(load_config(config, overrides), Path(config).stem, options, fixed)
