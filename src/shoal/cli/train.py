"""`shoal train`, `parity`, `bench layouts`, `advise`: arguments and help.

Loaded on demand, as they import the settings.
"""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from shoal.cli.help import RUN_DIR, SETTINGS, SHORT
from shoal.config.layout import Layout, parse_layout, settings_of
from shoal.config.load import load_config
from shoal.config.sections import Config
from shoal.errors import InputError
from shoal.runtime.startup import announce_loading, loading

_RANKS = Group("Processes and hosts", sort_key=1)
_START = Group("Start and stop", sort_key=2)
_SETTINGS = Group(SETTINGS, sort_key=3)
Settings = Annotated[Config | None, Parameter(name="*", group=_SETTINGS)]


def train(
    config: str,
    /,
    *,
    data: tuple[Path, ...] = (),
    run_dir: Annotated[Path | None, Parameter(name=RUN_DIR)] = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    nproc: Annotated[int | None, Parameter(group=_RANKS)] = None,
    layout: Annotated[str | None, Parameter(group=_RANKS)] = None,
    force: Annotated[bool, Parameter(group=_RANKS)] = False,
    max_restarts: Annotated[int | None, Parameter(group=_RANKS)] = None,
    nnodes: Annotated[int, Parameter(group=_RANKS)] = 1,
    rdzv: Annotated[str | None, Parameter(group=_RANKS)] = None,
    node_rank: Annotated[int | None, Parameter(group=_RANKS)] = None,
    init: Annotated[Path | None, Parameter(group=_START)] = None,
    init_optimizer: Annotated[bool, Parameter(group=_START)] = False,
    allow_tokenizer_mismatch: Annotated[bool, Parameter(group=_START)] = False,
    max_time: Annotated[float | None, Parameter(group=_START)] = None,
    stop_after: Annotated[int | None, Parameter(group=_START)] = None,
    verbose: bool = False,
    settings: Settings = None,
) -> int:
    """Train a GPT or a classic network; run the same command again to resume.

    Parameters
    ----------
    config
        Preset (tiny, gpt2, llama-160m, ...) or TOML file.
    data
        Dataset folders made by `shoal prepare`. Several are mixed by size, or by data.weights.
    run_dir
        Folder for settings, metrics and checkpoints (default: runs/CONFIG-DATASET).
    steps
        Optimiser steps in total; short for --train.steps.
    lr
        Peak learning rate; short for --optimizer.lr.
    batch_size
        Sequences per optimiser step, over all processes; short for --train.global-batch-size.
    seq_len
        Tokens per training sequence; short for --train.seq-len.
    nproc
        Worker processes on this host (default: 1, or as many as --layout needs).
    layout
        Parallel layout, such as dp4, tp2*dp2 or zero3x4 (docs/layouts.md), or auto: the fastest that fits.
    force
        Start even if the plan says that the memory does not suffice.
    max_restarts
        Restarts after a rank has failed (default: 3 with several processes, else 0).
    nnodes
        Number of hosts; run the same command on each.
    rdzv
        Rendezvous address as HOST:PORT: the name or IP address of the first host, and a free port on it.
    node_rank
        Number of this host, from 0 (default: 0 for the host that owns the address in --rdzv).
    init
        Run, checkpoint or Hugging Face folder with the initial weights (and for finetune, the model's shape).
    init_optimizer
        With --init, also load the optimiser's moments.
    allow_tokenizer_mismatch
        Warn, instead of failing, about a different tokenizer with the same number of ids.
    max_time
        Seconds after which to save and exit with status 75.
    stop_after
        Step after which to save and exit with status 75; the schedule stays that of the full run.
    verbose
        Print the full run summary, and add phase times, memory, and their range over the ranks to each line.
    settings
        Any setting of the configuration, as --section.field VALUE; overrides the file.
    """
    overrides = collect(settings, data, max_time, stop_after, allow_tokenizer_mismatch)
    _add_short(overrides, steps=steps, lr=lr, batch_size=batch_size, seq_len=seq_len)
    layout = _choose_layout(config, overrides, layout, init, nproc, nnodes)
    words, resolved = _resolve(config, overrides, layout, init)  # reports mistakes before torch is loaded
    asked = (resolved, _named(run_dir, config, resolved), init, init_optimizer, words)
    return _start(asked, verbose, force, nproc, max_restarts, (nnodes, rdzv, node_rank))


def parity(
    config: str,
    /,
    *,
    layouts: str,
    data: tuple[Path, ...] = (),
    reference: str = "1",
    steps: int = 5,
    json: Path | None = None,
    settings: Settings = None,
) -> int:
    """Compare training under several layouts with one process, tensor by tensor.

    Parameters
    ----------
    config
        Preset (tiny, gpt2, llama-160m, ...) or TOML file.
    layouts
        Layouts to test, separated by commas, such as "dp2, zero3x4, tp2+sp, pp2*dp2"; see docs/layouts.md.
    data
        Dataset folders (default: a small random dataset).
    reference
        Layout to compare with. The default, 1, is one process; use another if the model needs several.
    steps
        Optimiser steps per layout.
    json
        JSON file to write the result to.
    settings
        Any setting of the configuration, as --section.field VALUE; overrides the file.
    """
    resolved = load_config(config, collect(settings, data))
    with loading():
        from shoal.parity.command import parity as run

    return run(resolved, layouts, reference=reference, steps=steps, json=json)


def layouts(
    config: str,
    /,
    *,
    layouts: str,
    data: tuple[Path, ...] = (),
    steps: int | None = None,
    warmup: int = 5,
    runs: Path | None = None,
    output: Annotated[Path | None, Parameter(name=("--output", "--json"))] = None,
    plot: Path | None = None,
    settings: Settings = None,
) -> int:
    """Benchmark one training under several layouts: step time by phase, memory, loss, perplexity.

    Parameters
    ----------
    config
        Preset (tiny, gpt2, llama-160m, ...) or TOML file.
    layouts
        Layouts to compare, separated by commas, such as "1, dp2, tp2+sp, pp2, zero3x2"; see docs/layouts.md.
    data
        Dataset folders made by `shoal prepare` (default: a small generated one, which has no test split).
    steps
        Optimiser steps per layout (default: 40).
    warmup
        Number of first steps that are not timed.
    runs
        Folder to keep the run folders in; finished runs are not repeated (default: a temporary folder).
    output
        JSON file for the results with machine, versions and all samples, updated after each layout. The same
        command continues it.
    plot
        PNG file for a plot of the phases of a step, with the peak memory beside it.
    settings
        Any setting of the configuration, as --section.field VALUE; overrides the file.
    """
    overrides = collect(settings, data)
    _add_short(overrides, steps=steps)
    count = overrides.setdefault("train", {}).setdefault("steps", 40)
    overrides["train"]["sinks"] = []
    overrides.setdefault("eval", {})["every"] = count  # once, at the end
    overrides.setdefault("checkpoint", {})["every"] = 0  # only then
    chosen = [parse_layout(words) for words in layouts.split(",") if words.strip()]
    resolved = load_config(config, overrides)
    with loading():
        from shoal.bench.layouts import command

    return command(resolved, Path(config).stem, chosen, warmup, runs, output, plot)


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
    settings: Settings = None,
) -> int:
    """Recommend a synchronisation strategy for a link, from measurements.

    Parameters
    ----------
    config
        Preset, TOML file, or run folder, whose recorded step times are used.
    nproc
        Number of measuring processes on this host (default: the number of processes in --layout, or 1 with
        --link). Under torchrun or srun, the launched processes are used.
    layout
        Layout to predict for, such as dp4 or dp2*zero2x2 (default: dp2, or the layout of the run).
    hosts
        Number of hosts that the replicas are distributed over (default: the hosts of this job, or one host
        per replica).
    link
        Bandwidth per direction and latency, such as 100mbit or 1gbit,0.2ms (default: measured; latency:
        0.1 ms).
    step_ms
        Step time of a replica without communication, in milliseconds (default: measured).
    seconds
        Longest time for measuring the link, in seconds.
    data
        Dataset folders (default: random tokens).
    json
        JSON file to write the result to.
    settings
        Any setting of the configuration, as --section.field VALUE; overrides the file. Each strategy uses
        those of the section sync that apply to it.
    """
    run_dir = Path(config) if Path(config).is_dir() else None
    source = str(run_dir / "config.toml") if run_dir else config
    resolved = load_config(source, collect(settings, data))
    with loading():
        from shoal.plan.advise import AdviseOptions, command

    return command(resolved, AdviseOptions(run_dir, nproc, layout, hosts, link, step_ms, seconds, json))


def _start(
    asked: tuple[Config, Path, Path | None, bool, Layout | None],
    verbose: bool,
    force: bool,
    nproc: int | None,
    max_restarts: int | None,
    hosts: tuple[int, str | None, int | None],
) -> int:
    """Plan a run, load what it needs, and train."""
    config, *_, words = asked
    nnodes = hosts[0]
    workers = nproc or (words.world_size // max(1, nnodes) if words else 1)
    announce_loading(f"starting {workers} workers, " if workers > 1 else "")
    # Ranks are forked from a server that is forked here, and do not need what plans.
    _load(launching=max_restarts is not None or nnodes > 1 or workers > 1)
    plan = _plan(config, workers, nnodes, force)
    from shoal.launch.start import start
    from shoal.train.request import Request

    return start(Request(*asked, verbose=verbose, plan=plan), nproc, max_restarts, hosts)


def _choose_layout(
    config: str,
    overrides: dict[str, dict[str, Any]],
    layout: str | None,
    init: Path | None,
    nproc: int | None,
    nnodes: int,
) -> str | None:
    """Return the words of a layout; for auto the planner's, which adds other settings that it has chosen.

    The workers, which get this process's arguments, are told the choice.
    """
    if layout != "auto":
        return layout
    from shoal.plan.grading import choose_layout, settings_of_choice
    from shoal.runtime.rank_info import read_rank_info

    if read_rank_info() is not None or nnodes != 1:
        raise InputError(
            "--layout auto is for the processes that this command starts on one host",
            hint="give the layout that `shoal plan` names",
        )
    if given := sorted(overrides.get("parallel", {}).keys() - {"offload", "split"}):  # a layout's words
        raise InputError(
            f"--layout auto chooses parallel.{given[0]}, and so does --parallel.{given[0].replace('_', '-')}",
            hint="leave one of them out",
        )
    _, resolved = _resolve(config, overrides, None, init)
    fixed = {f"{section}.{name}" for section, values in overrides.items() for name in values}
    plan = choose_layout(resolved, fixed, nproc or 0)
    words = str(plan.workload.layout)
    print(f"layout: {plan}", flush=True)
    given = [words if (a, b) == ("--layout", "auto") else b for a, b in pairwise(sys.argv)]
    sys.argv[1:] = [f"--layout={words}" if word == "--layout=auto" else word for word in given]
    for section, values in settings_of_choice(plan, resolved).items():
        for name, value in values.items():
            if name not in overrides.get(section, {}) and value != getattr(getattr(resolved, section), name):
                overrides.setdefault(section, {})[name] = value
                option = f"--{section}.{'' if value is not False else 'no-'}{name.replace('_', '-')}"
                if isinstance(value, bool):
                    sys.argv.append(option)
                else:
                    each = value if isinstance(value, tuple) else (value,)
                    sys.argv += [word for one in each for word in (option, str(one))]
    return words


def _plan(resolved: Config, workers: int, nnodes: int, force: bool) -> dict[str, Any] | None:
    """Plan a run that begins here; a launcher has planned that of its workers."""
    from shoal.runtime.rank_info import launched_by_us, read_rank_info, read_replica_group

    if launched_by_us() or read_replica_group() is not None:
        return None
    from shoal.plan.grading import plan_run

    if (info := read_rank_info()) is not None:
        workers, nnodes = info.local_world_size, info.world_size // info.local_world_size
    return plan_run(resolved, workers, nnodes, force=force)


def _load(*, launching: bool) -> None:
    """Load what takes seconds; where this process starts workers, or may be one, what they need, too."""
    from shoal.launch.forking import load
    from shoal.runtime.allocator import keep_memory
    from shoal.runtime.log import quieten_libraries
    from shoal.runtime.rank_info import read_rank_info, read_replica_group

    gc.disable()  # until all is loaded
    quieten_libraries()  # before torch is imported, which looks at the level of its own log then
    group = read_replica_group()
    if launching and read_rank_info() is None and (group is None or group.size > 1):
        load()
    keep_memory()


def _named(run_dir: Path | None, config: str, resolved: Config) -> Path:
    """Return the folder of a run: --run-dir, or one named after what is trained on what."""
    names = [Path(config).stem, *(Path(dataset).name for dataset in resolved.data.datasets)]
    return (run_dir or Path("runs") / "-".join(names)).absolute()


def _add_short(overrides: dict[str, dict[str, Any]], **given: float | None) -> None:
    """Add what options with short names set; the long name beside it is an error."""
    for short, value in given.items():
        section, _, field = SHORT[short].partition(".")
        if value is None:
            continue
        if field in overrides.setdefault(section, {}):
            names = (f"--{name.replace('_', '-')}" for name in (short, SHORT[short]))
            raise InputError(f"{' and '.join(names)} set the same value", hint="leave one of the two out")
        overrides[section][field] = value


def _resolve(
    config: str, overrides: dict[str, dict[str, Any]], layout: str | None, init: Path | None
) -> tuple[Layout | None, Config]:
    """Return the layout in words, and the configuration; a Hugging Face folder gives what it leaves out."""
    words = _lay_out(overrides, layout)
    resolved = load_config(config, overrides)
    if init is not None:
        from shoal.interop.hugging_face import with_model_of

        resolved = with_model_of(resolved, init)
    return words, resolved


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


def collect(
    settings: Config | None,
    data: tuple[Path, ...],
    max_time: float | None = None,
    stop_after: int | None = None,
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
