"""Measured rates of this machine, as stored for later plans (no torch)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from shoal.errors import InputError
from shoal.plan.cluster import Cluster, DeviceSpec
from shoal.plan.link_cost import Link
from shoal.plan.rates import BACKWARD, COLLECTIVES, KERNELS, Law, Rates, table_rates
from shoal.runtime.files import cache_folder, read_json, write_json

HERE = "here"  # name of this machine's device
_VERSION = 3
T = TypeVar("T")
_MOST_BYTES = 1 << 20
_HOST_BYTES_PER_S = 15.75e9  # PCIe 3.0 x16, for a GPU whose copies were not measured
_MOST = 1e3  # seconds of an operation, a byte or a call that are believed


@dataclass(frozen=True)
class Machine:
    """Measurements of a machine; `laws` are by number of processes (one, or all cores busy) and format."""

    name: str  # of the processor or GPU
    kind: Literal["cuda", "cpu"]
    devices: int  # GPUs, or cores
    memory_bytes: int  # of a GPU, or of the host
    laws: dict[str, dict[str, dict[str, Law]]]
    links: dict[str, Link]  # between two processes, by collective; none where only one was measured
    overlap: float  # see Rates
    host_bytes_per_s: float = 0.0  # of copies between a GPU and page-locked host memory; 0: not measured

    def rates(self, processes: int, dtype: str) -> Rates | None:
        """Return the rates of one of so many processes of a node; None for a format that was not measured."""
        laws = self._laws(processes).get(dtype)
        return Rates(laws, self.links, 1.0, self.overlap) if laws else None

    def _laws(self, processes: int) -> dict[str, dict[str, Law]]:
        """Return the laws of one of so many processes, by format; GPUs are not shared.

        The threads of one process use all cores as those of two do, so that further processes divide the
        operations and bytes of a second among more. A call takes one core, and waits for it where there are
        more processes than cores.
        """
        measured = 1 if processes == 1 or "2" not in self.laws else 2
        laws = self.laws[str(measured)]
        if self.kind == "cuda" or processes <= measured:
            return laws
        work, calls = processes / measured, processes / min(processes, max(measured, self.devices))
        return {
            dtype: {
                kernel: Law(law.flop_s * work, law.byte_s * work, law.call_s * calls)
                for kernel, law in each.items()
            }
            for dtype, each in laws.items()
        }

    def cluster(self, processes: int, known: Cluster | None = None) -> Cluster:
        """Return this machine with so many processes.

        `known` is the same as the hardware table has it, if its GPUs are in there: its peaks, copies to host
        memory, links to other nodes and price count. Otherwise peaks are the rates of large products.
        """
        if known is not None:
            device = replace(known.device, name=HERE, memory_bytes=self.memory_bytes)
            return replace(known, device=device, inside=self.links.get("all_reduce", known.inside))
        laws = self._laws(processes)
        share = 1 if self.kind == "cuda" else processes
        flops = {name: 1 / max(each["product"].flop_s, 1e-20) for name, each in laws.items()}
        memory = 1 / max(next(iter(laws.values()))["memory"].byte_s, 1e-20)
        host = memory if self.kind == "cpu" else self.host_bytes_per_s or _HOST_BYTES_PER_S
        device = DeviceSpec(HERE, self.kind, self.memory_bytes / share, flops, memory, host, 0.0, 1.0, 1.0)
        link = self.links.get("all_reduce", Link(100e-6, 1e9))
        return Cluster(device, processes, 1, link, link)


def rates_of(device: DeviceSpec, per_node: int, dtype: str) -> Rates:
    """Return the measured rates of this machine if it is the device, else those of the hardware table.

    Raises:
        ConfigError: A GPU that does not have the number format.
    """
    if device.name == HERE and (machine := load_machine()) is not None:
        found = machine.rates(per_node, dtype)
        if found is not None:
            return found
    return table_rates(device, dtype)


def load_machine(folder: Path | None = None) -> Machine | None:
    """Return what was measured on this machine; None if nothing was.

    Raises:
        InputError: The file holds something else.
    """
    return stored((folder or cache_folder()) / "machine.json", _load)


def stored(file: Path, load: Callable[[Path, int, int], T]) -> T | None:
    """Return what `load` makes of a file, the moment of its last change and its size; None without a file."""
    try:
        state = file.stat()
    except OSError:
        return None
    return load(file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=4)
def _load(file: Path, _changed_ns: int, size: int) -> Machine:
    remedy = f"measure again with shoal plan --measure, or delete {file}"
    if size > _MOST_BYTES:
        raise InputError(f"{file} has {size:,} bytes: not a file of measured rates", hint=remedy)
    found = read_json(file, "file of measured rates")
    try:
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']}")
        laws = {
            str(count): {
                dtype: {_kernel(name): _law(values) for name, values in each.items()}
                for dtype, each in formats.items()
            }
            for count, formats in found["laws"].items()
        }
        if "1" not in laws or not all(
            {"product", "memory"} <= set(x) for y in laws.values() for x in y.values()
        ):
            raise ValueError("no rates of products and memory")
        links = {_collective(name): Link(*map(_number, values)) for name, values in found["links"].items()}
        kind = found["kind"]
        if kind not in ("cuda", "cpu") or not all(link.bytes_per_s for link in links.values()):
            raise ValueError("no kind of device, or a link without bandwidth")
        devices, memory = int(_number(found["devices"])), int(_number(found["memory_bytes"]))
        overlap, host = min(1.0, _number(found["overlap"])), _number(found.get("host_bytes_per_s", 0.0))
        return Machine(str(found["name"]), kind, devices, memory, laws, links, overlap, host)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{file} is not a file of measured rates: {error}", hint=remedy) from error


def save_machine(machine: Machine, folder: Path | None = None) -> Path:
    """Store measurements for later plans; return the file."""
    file = (folder or cache_folder()) / "machine.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    links = {name: [link.latency_s, link.bytes_per_s] for name, link in machine.links.items()}
    write_json(file, {"version": _VERSION, **vars(machine), "links": links})
    return file


def _kernel(name: str) -> str:
    if name.removesuffix(BACKWARD) not in KERNELS:
        raise ValueError(f"unknown kernel {name}")
    return name


def _collective(name: str) -> str:
    if name not in COLLECTIVES:
        raise ValueError(f"unknown collective {name}")
    return name


def _law(values: Any) -> Law:
    law = Law(*(_number(value) for value in values))
    if max(law) > _MOST:
        raise ValueError(f"{max(law):g} seconds")
    return law


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a number from 0 on")
    return float(value)
