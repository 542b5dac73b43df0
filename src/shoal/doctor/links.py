"""What joins ranks on a host and leads out of it: shared memory, InfiniBand, GPUs; and the back end to use.

Each check can be given what it would look up: a folder in place of /sys, the text of a command. So the checks
of hardware that a machine does not have are tested on it all the same; there they say "none".
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import time
from pathlib import Path

from shoal.doctor.machine import Finding, rank_command, run_ranks

SHM_WANTED_BYTES = 1_000_000_000
SLOW_COPY_BYTES_PER_S = 5e9  # below what four lanes of PCIe 4 carry
COPY_BYTES = 256 << 20
COMMAND_LIMIT_S = 10.0
_FAR = ("NODE", "SYS")  # nvidia-smi's words for paths between GPUs that cross host bridges or processors


def check_shared_memory(size: int | None = None) -> Finding:
    """Is /dev/shm, through which NCCL's ranks on one host talk, large enough?"""
    if size is None:
        if not Path("/dev/shm").is_dir():
            return Finding("/dev/shm", "ok", "none")
        size = shutil.disk_usage("/dev/shm").total
    fact = f"{size / 1e9:.1f} GB"
    if size < SHM_WANTED_BYTES:
        advice = (
            "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
        )
        return Finding("/dev/shm", "warning", fact, advice)
    return Finding("/dev/shm", "ok", fact)


def check_memlock(limit: int | None = None, infiniband: bool | None = None) -> Finding:
    """May programs pin memory, as InfiniBand needs? `limit` in bytes, -1 for no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    infiniband = bool(infiniband_ports()) if infiniband is None else infiniband
    fact = "no limit" if limit in (-1, resource.RLIM_INFINITY) else f"{limit / 1e6:.1f} MB"
    if infiniband and fact != "no limit":
        advice = "InfiniBand needs pinned memory: ulimit -l unlimited (in a container: --ulimit memlock=-1)"
        return Finding("memlock", "warning", fact, advice)
    return Finding("memlock", "ok", fact if infiniband else f"{fact}; only InfiniBand needs more")


def infiniband_ports(root: Path = Path("/sys")) -> dict[str, str]:
    """Return "device:port" -> state, link layer and rate of each InfiniBand or RoCE port."""
    ports = {}
    for port in sorted(root.glob("class/infiniband/*/ports/*")):
        state, layer, rate = (_read(port / name) for name in ("state", "link_layer", "rate"))
        ports[f"{port.parent.parent.name}:{port.name}"] = f"{state.rpartition(': ')[2]} {layer} {rate}"
    return ports


def check_infiniband(root: Path = Path("/sys")) -> Finding:
    """Are there InfiniBand or RoCE ports, and are they up?"""
    ports = infiniband_ports(root)
    if not ports:
        return Finding("InfiniBand", "ok", "none")
    fact = "; ".join(f"{port} {text}" for port, text in ports.items())
    if not any(text.startswith("ACTIVE") for text in ports.values()):
        return Finding(
            "InfiniBand", "warning", fact, "no port is active: check cable and subnet manager (ibstat)"
        )
    return Finding("InfiniBand", "ok", fact)


def check_gpudirect(gpus: int | None = None, root: Path = Path("/sys")) -> Finding:
    """Can network cards read GPU memory without a copy through the host?"""
    gpus = _num_gpus() if gpus is None else gpus
    if not gpus or not infiniband_ports(root):
        return Finding("GPUDirect", "ok", "none: it needs GPUs and InfiniBand")
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if (root / "module" / module).is_dir():
            return Finding("GPUDirect", "ok", f"{module} is loaded")
    advice = "transfers between hosts go through host memory: modprobe nvidia_peermem"
    return Finding("GPUDirect", "warning", "nvidia_peermem is not loaded", advice)


def check_gpu_paths(topology: str | None = None) -> Finding:
    """How are GPUs joined to each other, as `nvidia-smi topo -m` tells it?"""
    topology = _topology() if topology is None else topology
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", topology).splitlines()]
    gpus = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    if len(gpus) < 2:
        return Finding("GPU paths", "ok", "none" if not gpus else "one GPU: none are needed")
    paths: dict[str, list[str]] = {}
    for one, row in enumerate(gpus):
        for other in range(one + 1, len(gpus)):
            paths.setdefault(row[1 + other], []).append(f"{row[0]}-{gpus[other][0]}")
    fact = "; ".join(f"{kind}: {_some(pairs)}" for kind, pairs in sorted(paths.items()))
    far = [pair for kind in _FAR for pair in paths.get(kind, [])]
    if far and len(paths) > 1:
        advice = f"keep tensor parallelism among close GPUs: {_some(far)} cross processors or bridges"
        return Finding("GPU paths", "warning", fact, advice)
    return Finding("GPU paths", "ok", fact)


def check_copy_rate(rates: tuple[float, float] | None = None) -> Finding:
    """How fast does memory move between host and GPU, in bytes a second to it and from it?"""
    if rates is None:
        if not _num_gpus():
            return Finding("host copies", "ok", "none: no GPU")
        rates = _measure_copies()
    fact = f"{rates[0] / 1e9:.1f} GB/s to the GPU, {rates[1] / 1e9:.1f} GB/s from it, pinned memory"
    if min(rates) < SLOW_COPY_BYTES_PER_S:
        advice = "offload and saving will be slow: check the slot (nvidia-smi -q, PCIe link width)"
        return Finding("host copies", "warning", fact, advice)
    return Finding("host copies", "ok", fact)


def check_backend(
    gpus: int | None = None,
    *,
    nccl_error: str | None = None,
    infiniband: bool | None = None,
    ip_to_others: bool = True,
    torch_has_mpi: bool | None = None,
) -> Finding:
    """Which back end should carry tensors, and why? `nccl_error` is what the probe of NCCL ended with."""
    gpus = _num_gpus() if gpus is None else gpus
    infiniband = (
        any("ACTIVE" in text for text in infiniband_ports().values()) if infiniband is None else infiniband
    )
    if gpus:
        nccl_error = probe_nccl(gpus) if nccl_error is None else nccl_error
        if nccl_error:
            advice = "use --runtime.backend gloo, slower, until NCCL works"
            return Finding("back end", "warning", f"gloo: NCCL's probe failed: {nccl_error}", advice)
        return Finding("back end", "ok", "nccl: on GPUs it is the fastest over any link (auto takes it)")
    if infiniband and not ip_to_others:
        return _mpi_finding(torch_has_mpi)
    return Finding("back end", "ok", "gloo: it joins CPUs over any IP network (auto takes it)")


def probe_nccl(gpus: int) -> str:
    """Let up to two ranks add numbers over NCCL; return what went wrong, or nothing."""
    try:
        answers = run_ranks(rank_command("cuda"), min(gpus, 2))
    except subprocess.TimeoutExpired:
        return "the ranks did not meet in time"
    for status, _, errors in answers:
        if status:
            return (errors.strip().splitlines() or [f"exit status {status}"])[-1]
    return ""


def _mpi_finding(torch_has_mpi: bool | None) -> Finding:
    import torch

    if torch_has_mpi is None:
        torch_has_mpi = torch.distributed.is_mpi_available()
    fact = "mpi: only native InfiniBand joins these CPU hosts, and gloo needs IP"
    if torch_has_mpi:
        return Finding("back end", "ok", fact, "use --runtime.backend mpi, under mpirun")
    advice = "set up IP over InfiniBand and use gloo, or build torch with MPI and use --runtime.backend mpi"
    return Finding("back end", "warning", f"{fact}; this torch lacks MPI", advice)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _measure_copies() -> tuple[float, float]:
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((device, host), (host, device)):
        target.copy_(source)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(4 * COPY_BYTES / (time.perf_counter() - started))
    return rates[0], rates[1]


def _topology() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else "?"


def _some(pairs: list[str]) -> str:
    return ", ".join(pairs[:4]) + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")
