"""Memory of this process: anonymous host memory on a CPU rank, the allocator's figures on a CUDA rank."""

from __future__ import annotations

import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.runtime.allocator import available_memory
from shoal.runtime.cgroup import memory_limit
from shoal.runtime.device import Device


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use, the most there were, and bytes held from the system."""

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int


def free_memory(device: torch.device) -> int:
    """Return the bytes that new tensors could take on a device; a container's limit counts."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(available_memory(), memory_limit() or sys.maxsize)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is that of an allocator of torch, or of Python, that found no memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def memory_use(device: Device) -> MemoryUse:
    """Read the memory of this rank.

    CPU on Linux: RssAnon, VmHWM and VmRSS. Elsewhere only the peak resident size is known.
    """
    if device.is_cuda:
        index = device.torch_device
        return MemoryUse(
            torch.cuda.memory_allocated(index),
            torch.cuda.max_memory_allocated(index),
            torch.cuda.memory_reserved(index),
        )
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return MemoryUse(peak, peak, peak)
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return MemoryUse(*(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmHWM", "VmRSS")))
