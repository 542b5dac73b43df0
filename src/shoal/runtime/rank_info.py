"""The place of a process in a job, as its launcher's variables tell. Loaded before torch is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InputError
from shoal.runtime.startup import LAUNCHED, REPLICA_GROUP

# Rank, number of ranks, rank and number on this host: of Open MPI, and of MPICH and its kin.
_MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class RankInfo:
    """A rank's place in the job, read from the launcher's variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0  # restarts so far

    @property
    def is_on_several_hosts(self) -> bool:
        """Say whether some ranks are on another host."""
        return self.local_world_size < self.world_size


def read_rank_info(env: Mapping[str, str] | None = None) -> RankInfo | None:
    """Read the place of this process from torchrun's, mpirun's or Slurm's variables; None if none set any."""
    env = os.environ if env is None else env
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            world = int(env["WORLD_SIZE"])
            return RankInfo(
                rank=int(env["RANK"]),
                world_size=world,
                local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
                local_world_size=int(env.get("LOCAL_WORLD_SIZE", world)),
                attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
            )
        for names in _MPI:  # before Slurm's, which starts one process a host under mpirun
            if names[0] in env and names[2] in env:
                return RankInfo(*(int(env[name]) for name in names))
        # In the batch script itself, outside of srun, there is a task number but no step.
        if "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
            return RankInfo(
                rank=int(env["SLURM_PROCID"]),
                world_size=int(env["SLURM_NTASKS"]),
                local_rank=int(env["SLURM_LOCALID"]),
                local_world_size=_slurm_tasks_here(env),
                attempt=int(env.get("SLURM_RESTART_COUNT", 0)),
            )
    except (KeyError, ValueError) as error:
        raise InputError(
            f"the launcher's variables are incomplete or not numbers: {error}",
            hint="start with `shoal train --nproc N`, torchrun, mpirun or srun",
        ) from error
    return None


def launched_by_us() -> bool:
    """Say whether this process is a worker that our launcher started."""
    return launcher_pid() is not None


def launcher_pid() -> int | None:
    """Return the process id of the launcher that started this worker."""
    pid = os.environ.get(LAUNCHED)
    return int(pid) if pid else None


def _slurm_tasks_here(env: Mapping[str, str]) -> int:
    """Read SLURM_TASKS_PER_NODE, "2(x3),1": two tasks on each of three nodes, then one."""
    counts: list[int] = []
    for part in env.get("SLURM_TASKS_PER_NODE", env["SLURM_NTASKS"]).split(","):
        tasks, _, repeat = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(repeat or 1)
    return counts[int(env.get("SLURM_NODEID", 0))]


@dataclass(frozen=True)
class ReplicaGroupInfo:
    """Number and size of this process's replica group, and where the store of its quorums is."""

    replica: int
    num_replicas: int
    size: int  # processes of each
    host: str  # where the store is
    port: int
    mark: str  # of this start
    launcher: int  # process id

    def folder(self, run_dir: Path) -> Path:
        """Return the run folder of this replica group."""
        return group_folder(run_dir, self.replica)


def read_replica_group() -> ReplicaGroupInfo | None:
    """Return this process's replica group, if it was started as one."""
    text = os.environ.get(REPLICA_GROUP)
    return ReplicaGroupInfo(**json.loads(text)) if text else None


def group_folder(run_dir: Path, replica: int) -> Path:
    """Return the run folder of a replica, given the run's."""
    return run_dir / "replicas" / str(replica) if replica else run_dir
