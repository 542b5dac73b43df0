"""The machine that this process runs on, as a cluster of one node (no torch)."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from shoal.errors import InputError
from shoal.plan.cluster import Cluster, DeviceSpec, cluster_of, device_names, load_cluster
from shoal.plan.link_cost import Link
from shoal.plan.machine import Machine, load_machine
from shoal.runtime.allocator import available_memory
from shoal.runtime.cgroup import memory_limit
from shoal.runtime.cores import cpu_flags, logical_cores, physical_cores, processor_name

_DRIVER = Path("/proc/driver/nvidia/gpus")
_GPU_NODES = tuple(Path("/dev", name) for name in ("nvidiactl", "dxg", "kfd"))  # also of other drivers
_OTHERS = ("nvl", "laptop", "maxq", "gh200")  # GPUs that have names of the table in theirs, and other sizes
_GHZ = 3.0  # of cores whose clock Linux does not tell
_CHANNEL_BYTES_PER_S = (
    25.6e9  # DDR4-3200; two channels, and with more cores one for four, as in hardware.toml
)
_SHARE = 0.5  # of these that memory-bound kernels reach
_LOOPBACK = Link(100e-6, 2e9)  # gloo between processes of a host


def this_machine(device: str, processes: int = 0) -> Cluster:
    """Return what `shoal train` would use here with the setting runtime.device.

    GPUs if the driver names any and torch was built for them, else the processor, whose available memory and
    cores the processes share. `processes` 0: as many as there are GPUs or physical cores. Measured rates come
    before those of the table.

    Raises:
        InputError: The GPU is not in the table, or there are fewer than processes.
    """
    names = gpu_names() if device != "cpu" else []
    count = processes or len(names) or physical_cores()
    machine, memory = load_machine(), usable_memory()
    if not names:
        if device == "cuda" or (device == "auto" and any(path.exists() for path in _GPU_NODES)):
            raise InputError(
                "the driver does not name this machine's GPUs, so there is no plan for them",
                hint="describe them with --gpu and --gpus, or use --runtime.device cpu",
            )
        if machine is None or machine.kind == "cuda" or not _is_here(machine):
            return cluster_of(processor(memory), count, 1, _LOOPBACK, _LOOPBACK)
        return replace(machine, memory_bytes=memory).cluster(count)
    if count > len(names):
        raise InputError(
            f"{count} processes, but this machine has {len(names)} GPUs",
            hint="plan for another machine with --gpu and --gpus, or use --runtime.device cpu",
        )
    words = re.sub(r"[^a-z0-9]", "", names[0].lower())
    known = () if any(other in words for other in _OTHERS) else device_names()
    found = next((name for name in known if all(part in words for part in name.split("-"))), None)
    in_table = load_cluster(count, found, 1) if found else None
    if machine is not None and machine.kind == "cuda" and machine.name == names[0]:
        return machine.cluster(count, in_table)
    if in_table is None:
        raise InputError(f"{names[0]} is not in the planner's table", hint="describe it with --cluster FILE")
    return in_table


def _is_here(machine: Machine) -> bool:
    """Say whether this is the measured processor: folders of users are shared between hosts."""
    return (machine.name, machine.devices) == (f"CPU ({processor_name()})", logical_cores())


def gpu_names(driver: Path = _DRIVER) -> list[str]:
    """Return the models of the GPUs that torch could use here, as the driver names them."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if version and version.exists() and re.search(r"(?m)^cuda.*= None", version.read_text()):
        return []
    texts = [file.read_text() for file in sorted(driver.glob("*/information"))]
    names = [found[1].strip() for text in texts if (found := re.search(r"Model:(.*)", text))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([id for id in visible.split(",") if id.strip()])]


def usable_memory() -> int:
    """Return the bytes that new processes on this machine could take; a container's limit counts."""
    return min(available_memory(), memory_limit() or sys.maxsize)


def processor(memory: int) -> DeviceSpec:
    """Return this machine's processor: peaks by its instruction sets and clock, and so many bytes."""
    cores, flags = physical_cores(), cpu_flags()
    info = Path("/proc/cpuinfo")
    clock = re.search(r"cpu MHz\s*: ([\d.]+)", info.read_text() if info.exists() else "")
    # Two fused multiply-adds a cycle on vectors of 512, 256 or 128 bits.
    per_cycle = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
    rate = cores * per_cycle * (float(clock[1]) / 1e3 if clock else _GHZ) * 1e9
    flops = {"fp32": rate}
    if {"avx512_bf16", "amx_bf16"} & flags:
        flops["bf16"] = (8 if "amx_bf16" in flags else 2) * rate
    bandwidth = _CHANNEL_BYTES_PER_S * min(cores, max(2, cores // 4))
    return DeviceSpec(f"cpu-{cores}", "cpu", memory, flops, bandwidth, bandwidth, memory_share=_SHARE)
