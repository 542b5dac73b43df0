"""Is this machine sound by itself, and what should be done where it is not.

Each check returns one Finding. What it measures can be given to it instead, which is how it is tested. torch
is imported inside the checks, so that a machine without a working torch gets its diagnosis too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.runtime.allocator import available_memory, physical_memory
from shoal.runtime.cgroup import memory_limit

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
MEMORY_WANTED_BYTES = 4_000_000_000  # what `shoal quickstart` stays under
DISK_WANTED_BYTES = 2_000_000_000
SLOW_DISK_BYTES_PER_S = 50e6
PROBE_BYTES = 64 << 20
START_LIMIT_S = 60.0
SLOW_START_S = 20.0
END_LIMIT_S = 5.0
# mpirun starts nothing as root, as in a container, and no more ranks than cores, unless it is told to.
_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_MPI |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
_CHOICES = ("test", "tensorboard", "wandb", "trackio")  # extras that nobody misses before asking for them


@dataclass(frozen=True)
class Finding:
    """What one check saw, and what to do about it (empty where nothing needs doing)."""

    check: str
    status: Literal["ok", "warning", "problem"]
    fact: str
    advice: str = ""


def check_python(version: tuple[int, int, int] = sys.version_info[:3]) -> Finding:
    """Is the Python new enough?"""
    fact = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version < OLDEST_PYTHON:
        return Finding(
            "python", "problem", fact, "install Python 3.11 or newer, then: make clean setup PYTHON=..."
        )
    return Finding("python", "ok", fact)


def check_torch(import_version: Callable[[], str] | None = None) -> Finding:
    """Is torch there, does it start, is it new enough?"""
    try:
        version = (import_version or _torch_version)()
    except Exception as error:  # a broken installation raises anything from ImportError to OSError
        return Finding("torch", "problem", f"does not start: {error}", "make clean, then make setup")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        return Finding("torch", "problem", version, "install torch 2.11 or newer: pip install 'torch>=2.11'")
    return Finding("torch", "ok", version)


def check_devices(names: list[str] | None = None, has_nvidia: bool | None = None) -> Finding:
    """Which devices can ranks run on, and does each one compute?"""
    try:
        names = _cuda_names() if names is None else names
    except RuntimeError as error:
        return Finding(
            "devices", "problem", f"a CUDA device does not compute: {error}", "look at nvidia-smi; reboot"
        )
    has_nvidia = shutil.which("nvidia-smi") is not None if has_nvidia is None else has_nvidia
    if names:
        return Finding("devices", "ok", f"{len(names)} CUDA: {', '.join(sorted(set(names)))}")
    if has_nvidia:
        return Finding(
            "devices",
            "warning",
            "CPU only, though NVIDIA's driver is installed",
            "install a CUDA build of torch: make clean, then make setup TORCH_SOURCE=<index URL>",
        )
    return Finding("devices", "ok", "CPU")


def check_cores(
    physical: int | None = None, allowed: int | None = None, load: float | None = None
) -> Finding:
    """How many cores are ours, how many threads does that give a worker, and are they idle?"""
    from shoal.config.sections import Runtime
    from shoal.runtime.cores import logical_cores, physical_cores
    from shoal.runtime.device import choose_threads

    physical, allowed = physical or physical_cores(), allowed or logical_cores()
    load = os.getloadavg()[0] if load is None else load
    threads = {workers: choose_threads(Runtime(), workers) for workers in (1, 2)}
    fact = (
        f"{physical} physical; {allowed} of {os.cpu_count()} logical allowed here; threads a worker: "
        f"{threads[1][0]} for 1 worker, {threads[2][0]} for 2"
    )
    if threads[1][1] == "OMP_NUM_THREADS" and threads[1][0] > allowed:
        advice = f"lower OMP_NUM_THREADS to {physical} or unset it"
        return Finding("cores", "warning", f"{fact} (from OMP_NUM_THREADS)", advice)
    if allowed == 1:
        return Finding(
            "cores", "warning", fact, "two workers will share one core: allow this process more of them"
        )
    if load > allowed + 1:
        return Finding(
            "cores",
            "warning",
            f"{fact}; load {load:.1f}",
            "other programs use these cores: training will be slower",
        )
    return Finding("cores", "ok", fact)


def check_memory(total: int | None = None, available: int | None = None, limit: int | None = None) -> Finding:
    """Is there enough memory, counting a container's limit?"""
    total = total or physical_memory()
    available, limit = available or available_memory(), limit or memory_limit()
    usable = min(available, limit or available)
    limited = f"limited to {_gb(limit)} by the cgroup" if limit and limit < total else "no cgroup limit"
    fact = f"{_gb(total)} in all, {_gb(available)} available, {limited}"
    if usable < MEMORY_WANTED_BYTES:
        advice = (
            f"the quickstart wants {_gb(MEMORY_WANTED_BYTES)}: close programs or raise the container's limit"
        )
        return Finding("memory", "warning" if usable > MEMORY_WANTED_BYTES // 4 else "problem", fact, advice)
    return Finding("memory", "ok", fact)


def check_disk(folder: Path, free: int | None = None, probe_bytes: int = PROBE_BYTES) -> Finding:
    """Can this folder be written, how much room is left, and how fast is write + fsync?"""
    free = shutil.disk_usage(folder).free if free is None else free
    if free < probe_bytes:
        return Finding(
            "disk", "problem", f"{_gb(free)} free in {folder}", "free some space or work elsewhere"
        )
    try:
        rate = _write_rate(folder, probe_bytes)
    except OSError as error:
        advice = "work in a folder you own, or name one with --output and --run-dir"
        return Finding("disk", "problem", f"{folder} cannot be written: {error.strerror}", advice)
    fact = f"{_gb(free)} free in {folder}, write + fsync {rate / 1e6:.0f} MB/s"
    if free < DISK_WANTED_BYTES:
        return Finding("disk", "warning", fact, "free some space: a checkpoint takes 12 bytes a parameter")
    if rate < SLOW_DISK_BYTES_PER_S:
        return Finding(
            "disk", "warning", fact, "checkpoints will be slow: use a local disk, or save less often"
        )
    return Finding("disk", "ok", fact)


def check_bf16(native: bool | None = None, on_gpu: bool | None = None) -> Finding:
    """Which number format will precision.dtype = auto choose, and which is slow?"""
    import torch

    from shoal.runtime.device import bf16_is_native

    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    native = bf16_is_native(torch.device("cuda" if on_gpu else "cpu")) if native is None else native
    fact = f"native: {'yes, auto takes bf16' if native else 'no, auto takes fp32'}"
    return Finding("bf16", "ok", fact if on_gpu else f"{fact}; fp16 in software: some 50 times slower")


def check_loopback() -> Finding:
    """Can local workers meet: does localhost resolve, and is a port to be had?"""
    try:
        address = socket.gethostbyname("localhost")
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=5).close()
    except OSError as error:
        advice = "check that the loopback interface is up and that /etc/hosts has: 127.0.0.1 localhost"
        return Finding("loopback", "problem", f"local workers cannot meet: {error}", advice)
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        advice = f"matters for several machines only: add {host} to /etc/hosts or DNS"
        return Finding(
            "loopback", "warning", f"localhost is {address}; the name {host} does not resolve", advice
        )
    return Finding("loopback", "ok", f"localhost is {address}, {host} resolves")


def rank_command(device: str) -> list[str]:
    """Return the command of one rank that meets others on `device`."""
    return [sys.executable, "-c", f"import shoal.doctor.machine as d; d.meet_as_rank({device!r})"]


def check_two_processes(command: list[str] | None = None) -> Finding:
    """Do two processes really start, meet over gloo and add numbers?"""
    name, started = "2 processes", time.monotonic()
    try:
        answers = run_ranks(command or rank_command("cpu"), 2)
    except subprocess.TimeoutExpired:
        fact = f"two processes did not meet within {START_LIMIT_S:.0f} s"
        return Finding(name, "problem", fact, "look for a firewall on the loopback interface")
    elapsed_s = time.monotonic() - started
    for code, out, err in answers:
        if code != 0 or not out.strip():
            last = (err.strip().splitlines() or [f"exit status {code}"])[-1]
            return Finding(name, "problem", f"a rank failed: {last}", "shoal train --nproc 1 still works")
    millis = max(json.loads(out)["all_reduce_ms"] for _, out, _ in answers)
    fact = f"started and agreed over gloo in {elapsed_s:.1f} s; all_reduce of 4 MiB in {millis:.1f} ms"
    if elapsed_s > SLOW_START_S:
        return Finding(name, "warning", fact, "each start and restart costs this: put .venv on a local disk")
    return Finding(name, "ok", fact)


def meet_as_rank(device: str) -> None:
    """Be one rank that `run_ranks` starts: join, all_reduce, print what it took as JSON."""
    import torch
    import torch.distributed as dist

    from shoal.config.sections import Runtime
    from shoal.runtime.process import join, leave

    process = join(Runtime.model_validate({"device": device, "timeout_s": START_LIMIT_S, "threads": 1}))
    numbers = torch.full((1 << 20,), float(process.rank + 1), device=process.device.torch_device)
    process.any(False)  # all are here
    started = time.perf_counter()
    dist.all_reduce(numbers)
    process.device.synchronise()
    elapsed_s = time.perf_counter() - started
    expected = sum(range(1, process.world_size + 1))
    assert bool((numbers == expected).all()), f"{expected} was expected, it gave {numbers[0].item()}"
    print(json.dumps({"all_reduce_ms": elapsed_s * 1e3}))
    leave()


def check_extras(requirements: list[str] | None = None) -> Finding:
    """Which optional extras have all their packages?"""
    requirements = importlib.metadata.requires("shoal") or [] if requirements is None else requirements
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if name and extra and extra[1] not in _CHOICES:
            missing.setdefault(extra[1], []).extend([] if _is_installed(name[0]) else [name[0]])
    complete = ", ".join(extra for extra, names in missing.items() if not names) or "none"
    lacking = {extra: names for extra, names in missing.items() if names}
    if not lacking:
        return Finding("extras", "ok", f"complete: {complete}")
    fact = "; ".join(f"{extra} lacks {', '.join(names)}" for extra, names in lacking.items())
    return Finding(
        "extras", "warning", f"{fact}; complete: {complete}", f"pip install 'shoal[{','.join(lacking)}]'"
    )


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _cuda_names() -> list[str]:
    """Name the CUDA devices, having added something up on each."""
    import torch

    names = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        assert torch.ones(8, device=f"cuda:{index}").sum().item() == 8
        memory = _gb(torch.cuda.get_device_properties(index).total_memory)
        names.append(f"{torch.cuda.get_device_name(index)} ({memory})")
    return names


def _write_rate(folder: Path, num_bytes: int) -> float:
    """Write and fsync a temporary file; return bytes a second."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(num_bytes >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - started)


def run_ranks(command: list[str], world_size: int) -> list[tuple[int, str, str]]:
    """Run `command` as some ranks on this host; return exit status, stdout and stderr of each."""
    from shoal.launch.rendezvous import open_store
    from shoal.runtime.network import Endpoint

    # A store of ours is there before them: a port that is only found free may be taken until they listen.
    store = open_store(Endpoint(), "127.0.0.1", START_LIMIT_S)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    shared |= _MPI
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        return [
            (rank.returncode, *texts) for rank in ranks if (texts := rank.communicate(timeout=START_LIMIT_S))
        ]
    finally:
        for rank in ranks:
            rank.terminate()  # mpirun ends its ranks then; killed, it would leave them behind
        for rank in ranks:
            try:
                rank.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                rank.kill()


def find_mpirun() -> str:
    """Return the path of mpirun, of this Python's environment first; empty where it or mpi4py is missing."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return (_is_installed("mpi4py") and shutil.which("mpirun", path=path)) or ""


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
