"""Processor cores of this machine, and what they can do (no torch)."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from shoal.runtime.cgroup import cpu_limit


def logical_cores() -> int:
    """Count the cores this process may run on: affinity mask (and cpuset), then the cgroups' quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_limit()
    return max(1, min(allowed, int(quota))) if quota else allowed


def physical_cores() -> int:
    """Count physical cores among the ones this process may run on."""
    logical = logical_cores()
    if platform.system() == "Darwin":
        answer = subprocess.run(
            ["sysctl", "-n", "hw.physicalcpu"], capture_output=True, text=True, check=False
        )
        return min(logical, int(answer.stdout or logical))
    if not hasattr(os, "sched_getaffinity"):
        return logical
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(topology.read_text().strip() if topology.exists() else str(cpu))
    return max(1, min(len(cores), logical))


def processor_name() -> str:
    """Return the model of the processor."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Return the names of the processor's instruction sets; none where Linux does not tell them."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()
