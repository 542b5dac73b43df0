"""`shoal train`, `parity`, `advise`: arguments and help; loaded on demand, as they import the settings."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.config.layout import Layout, parse_layout, settings_of
from shoal.config.load import load_config
from shoal.config.sections import Config
from shoal.errors import InputError
from shoal.runtime.startup import announce_loading, loading


def train(
    config: str,
    /,
    *,
    data: tuple[Path, ...] = (),
    run_dir: Path | None = None,
    layout: str | None = None,
    nproc: int | None = None,
    max_restarts: int | None = None,
    nnodes: int = 1,
    rdzv: str | None = None,
    node_rank: int | None = None,
    init: Path | None = None,
    init_optimizer: bool = False,
    allow_tokenizer_mismatch: bool = False,
    max_time: float | None = None,
    stop_after: int | None = None,
    settings: Annotated[Config | None, Parameter(name="*")] = None,
) -> int:
    """Train a GPT, or a classic network, from a configuration; run the same command again to resume.

    The same command serves one process and many: start it alone, with --nproc, on several hosts with --nnodes
    and --rdzv, under torchrun or in a Slurm job.
    Exit status: 0 done, 1 failed, 2 bad input, 75 stopped on request with everything saved.

    Example: shoal train tiny --data datasets/my-text --run-dir runs/first --nproc 2 --train.steps 500

    Example: shoal train fcn-r --data datasets/mnist --nproc 4

    Parameters
    ----------
    config
        A TOML file, or the name of a preset: tiny, gpt2, llama-160m, ...; for labelled examples fcn-r.
    data
        Dataset folders made by `shoal prepare`; several are mixed, by data.weights or by their size.
    run_dir
        Folder of the run: settings, metrics, checkpoints. Default: runs/CONFIG-DATASET.
    layout
        How to cut model and batch, in words such as tp2*dp2 (docs/layouts.md); also starts that many workers.
    nproc
        Worker processes on this machine, each with its own device or share of the cores. Default: 1.
    max_restarts
        How often to start again after a rank has failed. Default: 3 with --nproc or --nnodes above 1.
    nnodes
        Hosts that train together; run the same command on each of them.
    rdzv
        HOST:PORT at which the hosts meet: an address of the first one, with a port that is free there.
    node_rank
        Number of this host, from 0. Left out, the host that owns the address of --rdzv is 0.
    init
        Start a new run from the weights of this run, checkpoint or Hugging Face folder: step 0, new
        optimiser, schedule and data. From a Hugging Face folder also comes the shape that CONFIG leaves out.
    init_optimizer
        With --init: keep the optimiser's moments too.
    allow_tokenizer_mismatch
        Warn only, where datasets, or the checkpoint of --init, have another tokenizer of the same size.
    max_time
        Save and exit with status 75 after this many seconds.
    stop_after
        Save and exit with status 75 after this step, keeping the schedule of the full run.
    settings
        Any setting of the configuration, as --section.field VALUE; it wins over the file.
    """
    overrides = _given(settings, data, max_time, stop_after, allow_tokenizer_mismatch)
    words = _lay_out(overrides, layout)
    resolved = load_config(config, overrides)  # a mistake is told before torch is loaded, which takes seconds
    if init is not None:
        from shoal.interop.hugging_face import with_model_of

        resolved = with_model_of(resolved, init)
    workers = nproc or (words.world_size // max(1, nnodes) if words else 1)
    _load(workers, launching=max_restarts is not None or nnodes > 1 or workers > 1)
    from shoal.launch.start import start
    from shoal.train.request import Request

    if run_dir is None:
        names = [Path(config).stem, *(Path(dataset).name for dataset in resolved.data.datasets)]
        run_dir = Path("runs") / "-".join(names)
    request = Request(resolved, run_dir.absolute(), init, init_optimizer, words)
    return start(request, nproc, max_restarts, (nnodes, rdzv, node_rank))


def parity(
    config: str,
    /,
    *,
    layouts: str,
    data: tuple[Path, ...] = (),
    reference: str = "1",
    steps: int = 5,
    json: Path | None = None,
    settings: Annotated[Config | None, Parameter(name="*")] = None,
) -> int:
    """Train a few steps under several layouts and compare them, tensor by tensor, with one process.

    Each difference is judged against a rounding floor, measured by adding up in another order. In fp32 and
    on the CPU, unless precision.dtype and runtime.device say otherwise.
    Exit status: 0 all differences are rounding, 1 one is a bug (or a rank failed), 2 bad input.

    Example: shoal parity tiny --layouts "dp2, tp2+sp, pp2*dp2, zero3x2" --json parity.json

    Parameters
    ----------
    config
        A TOML file, or the name of a preset: tiny, tiny-llama, gpt2, gpt2-medium, llama-160m, ...
    layouts
        Layouts in words, with commas between: dp2, zero3x4, tp2, tp2+sp, pp2, pp2+gpipe; * joins them.
    data
        Dataset folders; a small one is made for the occasion if left out.
    reference
        Layout to compare with; 1 is one process. Name another one where the model is too large for one.
    steps
        Optimiser steps under each layout.
    json
        Write all differences and verdicts to this file, too.
    settings
        Any setting of the configuration, as --section.field VALUE; it wins over the file.
    """
    resolved = load_config(config, _given(settings, data, None, None))
    with loading():
        from shoal.parity.command import parity as run

    return run(resolved, layouts, reference=reference, steps=steps, json=json)


def advise(
    config: str,
    /,
    *,
    nproc: int = 0,
    layout: str | None = None,
    hosts: int = 0,
    link: str | None = None,
    step_ms: float | None = None,
    seconds: float = 20.0,
    data: tuple[Path, ...] = (),
    json: Path | None = None,
    settings: Annotated[Config | None, Parameter(name="*")] = None,
) -> int:
    """Say which way to synchronise replicas pays on this link, and which would slow you down.

    Measures the link and a few steps of a replica, times what each strategy computes, and predicts its step:
    compute + its own work + the communication that nothing hides. "pays below" is the bandwidth at which a
    strategy breaks even with plain all-reduce; a fast link wants all-reduce, a slow one something else.

    Example: shoal advise tiny --nproc 2   (between processes of this machine)

    Example: shoal advise gpt2 --layout dp8 --link 100mbit,1ms   (eight hosts that are not here)

    Example: shoal advise runs/first --layout dp4 --link 1gbit --sync.every 50   (the pace of a run)

    Example: torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29400
    -m shoal advise gpt2 --data DATASET   (the link between hosts, on each of them)

    Parameters
    ----------
    config
        A TOML file, the name of a preset, or a run folder, whose steps are then read instead of measured.
    nproc
        Processes of this machine that measure, at the same time. Left out: as many as the layout, or one with
        --link. Under torchrun or srun theirs are used, on all hosts.
    layout
        What is planned, as dp4 or dp2*zero2x2; left out, nproc plain replicas (2, or as many as a run had).
    hosts
        Hosts that share the replicas; left out, those found, or each replica behind a link of its own.
    link
        Bandwidth one way and latency, as 100mbit or 1gbit,0.2ms, instead of measuring it (latency: 0.1 ms).
    step_ms
        A replica's step without communication, instead of measuring it.
    seconds
        Time for the link, at most.
    data
        Dataset folders; random tokens of a small vocabulary if left out.
    json
        Write all predictions to this file, too.
    settings
        Any setting of the configuration, as --section.field VALUE. Each strategy takes those of the section
        sync that it reads.
    """
    run_dir = Path(config) if Path(config).is_dir() else None
    source = str(run_dir / "config.toml") if run_dir else config
    resolved = load_config(source, _given(settings, data, None, None))
    with loading():
        from shoal.plan.advise import AdviseOptions, command

    return command(resolved, AdviseOptions(run_dir, nproc, layout, hosts, link, step_ms, seconds, json))


def _load(workers: int, *, launching: bool) -> None:
    """Load what takes seconds; where this process starts workers, or may be one, what they need, too."""
    from shoal.launch.forking import load
    from shoal.runtime.allocator import keep_memory
    from shoal.runtime.log import quieten_libraries
    from shoal.runtime.rank_info import read_rank_info, read_replica_group

    announce_loading(f"starting {workers} workers, " if workers > 1 else "")
    gc.disable()  # until all is loaded
    quieten_libraries()  # before torch is imported, which looks at the level of its own log then
    group = read_replica_group()
    if launching and read_rank_info() is None and (group is None or group.size > 1):
        load()
    keep_memory()


def _lay_out(overrides: dict[str, dict[str, Any]], words: str | None) -> Layout | None:
    """Add the settings of a layout in words to what the command line sets."""
    if words is None:
        return None
    layout = parse_layout(words)
    given, wanted = overrides.setdefault("parallel", {}), settings_of(layout)
    if both := sorted(given.keys() & wanted.keys()):
        raise InputError(
            f"--layout {words} sets parallel.{both[0]}, and so does --parallel.{both[0]}",
            hint="leave one of the two out",
        )
    given.update(wanted)
    return layout


def _given(
    settings: Config | None,
    data: tuple[Path, ...],
    max_time: float | None,
    stop_after: int | None,
    allow_tokenizer_mismatch: bool = False,
) -> dict[str, dict[str, Any]]:
    """Collect what the command line sets, section by section."""
    given: dict[str, dict[str, Any]] = {}
    if settings is not None:
        given = {
            section: {
                name: getattr(getattr(settings, section), name)
                for name in getattr(settings, section).model_fields_set
            }
            for section in settings.model_fields_set
        }
    if data:
        given.setdefault("data", {})["datasets"] = [str(path.absolute()) for path in data]
    if allow_tokenizer_mismatch:
        given.setdefault("data", {})["allow_tokenizer_mismatch"] = True
    if max_time is not None:
        given.setdefault("runtime", {})["max_time_s"] = max_time
    if stop_after is not None:
        given.setdefault("runtime", {})["stop_after"] = stop_after
    return given
