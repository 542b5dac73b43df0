"""How fast a device multiplies matrices: by its specification, and as measured here."""

from __future__ import annotations

import time

import torch

from shoal.runtime.device import Device

# Dense bf16 FLOP/s from the vendors' data sheets; the first name that a device's name contains counts.
_PEAK_BF16 = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
_SIZE = {"cpu": 1024, "cuda": 8192}
_BUDGET_S = 0.15


def peak_flops(device: Device, dtype: torch.dtype) -> float | None:
    """Return the specified dense FLOP/s of a known GPU in bf16; None for anything else."""
    if not device.is_cuda or dtype != torch.bfloat16:
        return None
    return next((peak for name, peak in _PEAK_BF16.items() if name in device.name), None)


def measured_flops(device: Device, dtype: torch.dtype) -> float:
    """Measure square matrix products for a moment and return the best rate in FLOP/s.

    Several ranks of a host measure at once, so each sees what its share of the host can do.
    """
    size = _SIZE[device.torch_device.type]
    a = torch.randn(size, size, device=device.torch_device).to(dtype)
    best = float("inf")
    until = time.perf_counter() + _BUDGET_S
    while time.perf_counter() < until or best == float("inf"):
        start = time.perf_counter()
        a @ a
        device.synchronise()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
