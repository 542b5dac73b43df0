"""Who launches whom: what `shoal train` does in a process that a user, a launcher or torchrun has started."""

from __future__ import annotations

import functools
import sys

from shoal.config.rules import hang_limit_s
from shoal.config.sync_rules import strategy_of
from shoal.errors import ConfigError, InputError
from shoal.launch.launcher import launch
from shoal.launch.rendezvous import Rendezvous
from shoal.runtime.cores import logical_cores
from shoal.runtime.log import log, to_screen
from shoal.runtime.network import Endpoint, several_hosts
from shoal.runtime.rank_info import RankInfo, launched_by_us, read_rank_info, read_replica_group
from shoal.runtime.run_folder import clear_folder, held, in_folder, in_sentences
from shoal.runtime.stop import end_with_launcher
from shoal.train import worker
from shoal.train.request import Request

Hosts = tuple[int, str | None, int | None]  # --nnodes, --rdzv, --node-rank


def start(request: Request, nproc: int | None, max_restarts: int | None, hosts: Hosts) -> int:
    """Train as what this process was started for: a replica group, a rank, or by the user.

    Returns shoal's exit status.
    """
    if (group := read_replica_group()) is not None:
        return _as_replica_group(request.on(group))
    if (info := read_rank_info()) is not None:
        return _as_rank(request, nproc, hosts[0], info)
    return _as_user(request, nproc, max_restarts, several_hosts(*hosts))


def _as_rank(request: Request, nproc: int | None, nnodes: int, info: RankInfo) -> int:
    """Train as one of the ranks that our launcher, torchrun or srun has started."""
    if (nproc not in (None, 1) or nnodes != 1) and not launched_by_us():
        given = f"--nproc {nproc}" if nproc not in (None, 1) else f"--nnodes {nnodes}"
        raise InputError(
            f"{given}: torchrun or srun has started the ranks already",
            hint="leave --nproc, --nnodes and --rdzv out",
        )
    layout = request.resolve_layout(info.world_size)
    if strategy_of(request.config).apart and layout.num_replicas > 1:
        raise ConfigError(
            f"sync.strategy = {request.config.sync.strategy} under {layout}: each replica is a world of its "
            f"own, and these {layout.world_size} processes were started as one",
            hint="start them with `shoal train` itself, on several hosts with --nnodes and --rdzv",
        )
    if launched_by_us() or info.local_rank:
        return worker.run(request)
    # Rank 0 holds the folder, and the first rank of another host, where it is shared, one of its own in it.
    with held(request.run_dir / f"ranks/first-{info.rank}" if info.rank else request.run_dir):
        return worker.run(request)


def _as_replica_group(request: Request) -> int:
    """Train one of the replicas that train apart, or be one of its ranks."""
    assert request.replica_group is not None
    if read_rank_info() is not None:
        return worker.run(request)
    end_with_launcher(request.replica_group.launcher)
    request.check(request.replica_group.size)
    with held(request.run_dir):
        # A lost one is started again as a whole, to join the others.
        return _train(request, request.replica_group.size, None if request.replica_group.size == 1 else 0)


def _as_user(request: Request, nproc: int | None, max_restarts: int | None, endpoint: Endpoint | None) -> int:
    """Check what can be checked in one process, then train here or launch workers."""
    nnodes = endpoint.nnodes if endpoint else 1
    if nproc is None:
        nproc = max(1, request.layout.world_size // nnodes) if request.layout else 1
    if nproc < 1:
        raise InputError(f"--nproc {nproc}: at least 1 is needed")
    whole = request.resolve_layout(nproc * nnodes)
    if strategy_of(request.config).apart and whole.num_replicas > 1:
        from shoal.strategies.replica_groups import launch_groups

        to_screen()
        request.check(nproc * nnodes)
        with in_sentences(request.run_dir):
            clear_folder(request.run_dir)  # each replica does so in its own
        return launch_groups(request, sys.argv[1:], nproc, max_restarts, endpoint)
    if endpoint is None:
        request.check(nproc)
        return in_folder(request.run_dir, functools.partial(_train, request, nproc, max_restarts))
    to_screen()
    hosts = Rendezvous(endpoint, nproc, request.config.runtime.timeout_s)
    try:
        log.info(hosts.describe())
        request.check(hosts.world_size)
        # Node 0 holds the folder; where it is shared, the others would find it held.
        folder = request.run_dir / f"ranks/node-{hosts.node}" if hosts.node else request.run_dir
        with held(folder):
            return _launch(request, nproc, max_restarts, hosts)
    finally:
        hosts.shutdown()


def _train(request: Request, nproc: int, max_restarts: int | None) -> int:
    if nproc == 1 and max_restarts is None:
        return worker.run(request)
    to_screen()
    return _launch(request, nproc, max_restarts)


def _launch(request: Request, nproc: int, max_restarts: int | None, hosts: Rendezvous | None = None) -> int:
    if nproc > logical_cores():
        log.warning(
            f"warning: --nproc {nproc} is above the {logical_cores()} cores of this machine: expect it slow"
        )
    if hosts is None or not hosts.node:
        request.store_plan()
    restarts = 3 if max_restarts is None else max_restarts
    return launch(sys.argv[1:], nproc, request.run_dir, restarts, hang_limit_s(request.config.runtime), hosts)
