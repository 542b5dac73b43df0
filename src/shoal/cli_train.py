"""`shoal train`: its arguments and help; loaded on demand, as it imports the configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.config.load import load_config
from shoal.config.sections import Config
from shoal.errors import InputError


def train(
    config: str,
    /,
    *,
    data: tuple[Path, ...] = (),
    run_dir: Path | None = None,
    nproc: int = 1,
    max_restarts: int | None = None,
    nnodes: int = 1,
    rdzv: str | None = None,
    node_rank: int | None = None,
    init: Path | None = None,
    init_optimizer: bool = False,
    max_time: float | None = None,
    stop_after: int | None = None,
    settings: Annotated[Config | None, Parameter(name="*")] = None,
) -> int:
    """Train a GPT from a configuration; run the same command again to resume.

    The same command serves one process and many: start it alone, with --nproc, on several hosts with --nnodes
    and --rdzv, under torchrun or in a Slurm job.
    Exit status: 0 done, 1 failed, 2 bad input, 75 stopped on request with everything saved.

    Example: shoal train tiny --data datasets/my-text --run-dir runs/first --nproc 2 --train.steps 500

    Parameters
    ----------
    config
        A TOML file, or the name of a preset: tiny, tiny-llama, gpt2, gpt2-medium, llama-160m, ...
    data
        Dataset folders made by `shoal prepare`; several are mixed, by data.weights or by their size.
    run_dir
        Folder of the run: settings, metrics, checkpoints. Default: runs/CONFIG-DATASET.
    nproc
        Worker processes on this machine, each with its own device or share of the cores.
    max_restarts
        How often to start again from the last committed checkpoint after a rank has failed. Default: 3 with
        --nproc or --nnodes above 1.
    nnodes
        Hosts that train together; run the same command on each of them.
    rdzv
        HOST:PORT at which the hosts meet: an address of the first one, with a port that is free there.
    node_rank
        Number of this host, from 0. Left out, the host that owns the address of --rdzv is 0.
    init
        Start a new run from the weights of this run or checkpoint: step 0, new optimiser, schedule and data.
    init_optimizer
        With --init: keep the optimiser's moments too.
    max_time
        Save and exit with status 75 after this many seconds.
    stop_after
        Save and exit with status 75 after this step, keeping the schedule of the full run.
    settings
        Any setting of the configuration, as --section.field VALUE; it wins over the file.
    """
    from shoal.runtime.allocator import keep_memory

    keep_memory()
    from shoal.runtime.log import quieten_libraries

    quieten_libraries()  # before torch is imported, which looks at the level of its own log then
    from shoal.runtime.network import several_hosts
    from shoal.runtime.process import read_seat
    from shoal.train.request import Request

    overrides = _given(settings, data, max_time, stop_after)
    resolved = load_config(config, overrides)
    if run_dir is None:
        names = [Path(config).stem, *(Path(dataset).name for dataset in resolved.data.datasets)]
        run_dir = Path("runs") / "-".join(names)
    request = Request(resolved, run_dir.absolute(), init, init_optimizer)
    if read_seat() is not None:
        return _join(request, nproc, nnodes)
    return _start(request, nproc, max_restarts, several_hosts(nnodes, rdzv, node_rank))


def _join(request: Any, nproc: int, nnodes: int) -> int:
    """Train as one of the ranks that our launcher, torchrun or srun has started."""
    from shoal.runtime.launch import launched_by_us

    if (nproc, nnodes) != (1, 1) and not launched_by_us():
        given = f"--nproc {nproc}" if nproc != 1 else f"--nnodes {nnodes}"
        raise InputError(
            f"{given}: torchrun or srun has started the ranks already",
            hint="leave --nproc, --nnodes and --rdzv out",
        )
    from shoal.train.worker import run

    return run(request)


def _start(request: Any, nproc: int, max_restarts: int | None, place: tuple[Any, ...]) -> int:
    """Check what can be checked in one process, then train here or launch workers."""
    from shoal.runtime.files import alone_in

    if nproc < 1:
        raise InputError(f"--nproc {nproc}: at least 1 is needed")
    if not place:
        request.check(nproc)
        with alone_in(request.run_dir):
            return _train(request, nproc, max_restarts)
    from shoal.runtime.log import log, to_screen
    from shoal.runtime.rendezvous import Place, Rendezvous

    to_screen()
    hosts = Rendezvous(Place(*place), nproc, request.config.runtime.timeout_s)
    try:
        log.info(hosts.describe())
        request.check(hosts.world_size)
        # Node 0 holds the folder; where it is shared, the others would find it held.
        folder = request.run_dir / f"ranks/node-{hosts.node}" if hosts.node else request.run_dir
        with alone_in(folder):
            return _launch(request, nproc, max_restarts, hosts)
    finally:
        hosts.shutdown()


def _train(request: Any, nproc: int, max_restarts: int | None) -> int:
    from shoal.runtime.log import to_screen

    if nproc == 1 and max_restarts is None:
        from shoal.train.worker import run as run_worker

        return run_worker(request)
    to_screen()
    return _launch(request, nproc, max_restarts)


def _launch(request: Any, nproc: int, max_restarts: int | None, hosts: Any = None) -> int:
    from shoal.runtime.device import logical_cores
    from shoal.runtime.launch import launch
    from shoal.runtime.log import log

    if nproc > logical_cores():
        log.warning(
            f"warning: --nproc {nproc} is above the {logical_cores()} cores of this machine: expect it slow"
        )
    return launch(sys.argv[1:], nproc, request.run_dir, 3 if max_restarts is None else max_restarts, hosts)


def _given(
    settings: Config | None, data: tuple[Path, ...], max_time: float | None, stop_after: int | None
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
    if max_time is not None:
        given.setdefault("runtime", {})["max_time_s"] = max_time
    if stop_after is not None:
        given.setdefault("runtime", {})["stop_after"] = stop_after
    return given
