"""Rates of a device: seconds of a kernel from its operations and bytes (no torch).

    seconds = flops x flop_s + bytes x byte_s + calls x call_s

The sum, in place of the roofline's maximum (Williams, Waterman and Patterson, 2009), gives small and thin
matrix products their lower rates without a table by size: a product of m x k by k x n does 2 m k n operations
on (m k + k n + m n) values, so that its efficiency falls as a side gets short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.errors import ConfigError
from shoal.plan.cluster import DeviceSpec
from shoal.plan.link_cost import Link

BACKWARD = " backward"  # suffix of the law of a kernel's backward pass
# What a rate can be measured of; kernels without a law of their own take that of "memory".
KERNELS: tuple[str, ...] = ("product", "attention", "norm", "gelu", "swiglu", "add", "rotate", "loss")
KERNELS += ("memory", "optimiser", "layer none", "layer selective", "layer full")  # by recompute
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
_CALL_S = {"cuda": 3e-6, "cpu": 10e-6}  # a kernel's start and end, when the queue is full
# FlashAttention-2 reaches 50 to 73 % of an A100's peak (Dao, 2023, section 4) and 35 % of an H100's (Shah et
# al., 2024, section 1), large products 75 and 65 %.
_ATTENTION_SHARE = {"cuda": 0.7, "cpu": 0.5}
_LINK_SHARE = 0.8  # of a link's peak, that large NCCL transfers reach
_OVERLAP = {"cuda": 0.9, "cpu": 0.3}
# A copy reads first what it will overwrite, and so moves 3 bytes for 2 that are counted (J. McCalpin,
# STREAM); an update in place needs what it reads.
_IN_PLACE = {"cuda": 1.0, "cpu": 2 / 3}
_SLOW_FORMAT = 50  # times: products of a format that a CPU does not have in hardware (see runtime.device)


class Law(NamedTuple):
    """Seconds of an operation, of a byte, and of a call."""

    flop_s: float
    byte_s: float
    call_s: float

    def seconds(self, flops: float, num_bytes: float, calls: float = 1) -> float:
        return flops * self.flop_s + num_bytes * self.byte_s + calls * self.call_s


@dataclass(frozen=True)
class Rates:
    """Rates of a process with one number format of matrix products."""

    laws: Mapping[str, Law]  # by kernel, with BACKWARD for backward passes; at least "product" and "memory"
    links: Mapping[str, Link] = field(default_factory=dict)  # measured in a node, by collective
    link_share: float = _LINK_SHARE  # of the bandwidth of a link that was not measured
    overlap: float = _OVERLAP["cuda"]  # hidden seconds of an exchange of one second beside computing

    def law(self, kernel: str) -> Law:
        """Return the law of a kernel, or of the nearest one that there is."""
        found = self.laws.get(kernel) or self.laws.get(kernel.removesuffix(BACKWARD))
        return found or self.laws["memory"]


def table_rates(device: DeviceSpec, dtype: str) -> Rates:
    """Return the rates that follow from a device's peaks.

    Raises:
        ConfigError: A GPU that does not have the number format.
    """
    peak = device.flops.get(dtype)
    if peak is None:
        if device.kind == "cuda":
            raise ConfigError(
                f"precision.dtype = {dtype}, which {device.name} does not compute",
                hint=f"use precision.dtype = {' or '.join(device.flops)}",
            )
        peak = device.flops["fp32"] / _SLOW_FORMAT
    flop_s = 1 / (peak * device.product_share)
    byte_s, call_s = 1 / (device.memory_bytes_per_s * device.memory_share), _CALL_S[device.kind]
    laws = {
        "product": Law(flop_s, byte_s, call_s),
        "attention": Law(flop_s / _ATTENTION_SHARE[device.kind], byte_s, call_s),
        "memory": Law(0.0, byte_s, call_s),
        "optimiser": Law(0.0, byte_s * _IN_PLACE[device.kind], call_s),
    }
    return Rates(laws, overlap=_OVERLAP[device.kind])
