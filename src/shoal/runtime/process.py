"""One rank: who it is, how it joins the others, and small agreements between all ranks."""

from __future__ import annotations

import contextlib
import os
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.config.sections import Runtime
from shoal.errors import InputError
from shoal.runtime import flight_recorder
from shoal.runtime.device import Device, choose_backend, choose_threads, select_device
from shoal.runtime.network import choose_interface, resolve
from shoal.runtime.rank_info import RankInfo, read_rank_info
from shoal.runtime.recording import recorded

_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # Open MPI's name of a job, another one for each


@dataclass(frozen=True)
class Process:
    """This rank, joined to the others. Agreements go over gloo, whatever the device."""

    info: RankInfo
    device: Device
    threads: int
    threads_reason: str
    control: dist.ProcessGroup  # agreements in the main thread
    saving: dist.ProcessGroup  # the checkpoint's background thread

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def world_size(self) -> int:
        return self.info.world_size

    def sum(self, *values: float) -> list[float]:
        """Add each value over all ranks in float64. Collective over the world."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return list(total.tolist())

    def gather(self, *values: float) -> list[list[float]]:
        """Return each rank's values. Collective over the world."""
        own = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyone, own, group=self.control)
        return [list(rank.tolist()) for rank in everyone]

    def any(self, flag: bool) -> bool:
        """Say whether any rank has the flag set. Collective over the world."""
        return self.sum(float(flag))[0] > 0


_recording = contextlib.ExitStack()


def join(runtime: Runtime, run_dir: Path | None = None) -> Process:
    """Join the process group with the rank that the launcher gave, or alone. Collective over the world.

    With `run_dir`, keep there what this rank does, for those who must say why a job hangs.
    """
    info = read_rank_info() or RankInfo()
    if run_dir is not None:
        flight_recorder.answer_with_stacks(run_dir, info.rank)
        _recording.enter_context(recorded(flight_recorder.FlightRecorder(run_dir, info.rank)))
    device = select_device(runtime.device, info.local_rank, info.local_world_size)
    timeout = timedelta(seconds=runtime.timeout_s)
    dist.init_process_group(
        choose_backend(runtime.backend, device),
        store=_open_store(info, timeout),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
    )
    return form_groups(info, device, runtime)


def form_groups(info: RankInfo, device: Device, runtime: Runtime) -> Process:
    """Make this rank's groups and set its threads. Collective over the world."""
    timeout = timedelta(seconds=runtime.timeout_s)
    threads, reason = choose_threads(runtime, info.local_world_size)
    torch.set_num_threads(threads)
    control, saving = (
        dist.new_group(backend="gloo", timeout=timeout, group_desc=name) for name in ("control", "saving")
    )
    return Process(info, device, threads, reason, control, saving)


def leave() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    flight_recorder.mark("done")
    _recording.close()


def _open_store(info: RankInfo, timeout: timedelta) -> dist.Store:
    """Open the store that ranks meet in, under a prefix of this attempt.

    Without the prefix, workers restarted by the agent read addresses of the dead attempt from its store.
    """
    if info.world_size == 1:
        return dist.HashStore()
    address, port = _master_address(info)
    choose_interface(resolve(address, port), across_hosts=info.is_on_several_hosts)
    agent_owns_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = info.rank == 0 and not agent_owns_store
    try:
        store = dist.TCPStore(
            address, port, info.world_size, is_master, timeout=timeout, wait_for_workers=False
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise InputError(
                f"port {port} on {address} is in use by another program", hint="choose another MASTER_PORT"
            ) from error
        raise InputError(
            f"rank {info.rank} cannot reach the store at {address}:{port}: {error}",
            hint="check MASTER_ADDR and MASTER_PORT, and that rank 0 runs",
        ) from error
    return dist.PrefixStore(f"attempt{info.attempt}", store)


def _master_address(info: RankInfo) -> tuple[str, int]:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    job = next((os.environ[name] for name in _MPI_JOB if name in os.environ), None)
    if not address and job and not info.is_on_several_hosts:  # mpirun does not say where ranks meet
        address, port = "127.0.0.1", port or str(20_000 + zlib.crc32(job.encode()) % 10_000)
    if not address or not port.isdigit():
        raise InputError(
            f"MASTER_ADDR = {address!r}, MASTER_PORT = {port!r}: several ranks need both to find each other",
            hint="set them in the job script, or start with `shoal train --nproc N` or torchrun, which do",
        )
    return address, int(port)
