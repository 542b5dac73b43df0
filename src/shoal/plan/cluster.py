"""Devices and the links between them, as the planner sees a cluster (no torch).

A cluster is a device of hardware.toml, or a file such as

    nodes = 4
    per_node = 8                    # as all that follows, taken from the device where it is left out
    inside = "3600gbit,10us"        # link of one device to another of its node, one way
    across = "400gbit,10us"         # to another node
    [device]
    like = "h100"                   # without it, all figures of an entry of hardware.toml must be given
    usd_per_hour = 2.5
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from shoal.config.load import line_of, read_toml
from shoal.errors import InputError, counted, nearest
from shoal.plan.link_cost import Link, parse_rate

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LATENCY_S = 100e-6  # default latency of a message, with TCP and gloo
_FORMATS = ("fp32", "bf16", "fp16")
_NUMBERS = {  # a device's figures, with the most that is believed
    "memory_gib": 1e5,
    "memory_bytes_per_s": 1e16,
    "host_bytes_per_s": 1e16,
    "product_share": 1.0,
    "memory_share": 1.0,
    "usd_per_hour": 1e6,
}
_OPTIONAL = ("usd_per_hour", "product_share", "memory_share")
_WORDS = ("kind", "inside", "across", "source", "fitted", "name", "like")
_MOST_DEVICES = 1 << 20
_MOST_FLOPS = 1e19


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator, or the share of a CPU that one process gets."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: float
    flops: dict[str, float]  # peak of dense matrix products, by number format: fp32, bf16, fp16
    memory_bytes_per_s: float  # peak, of the device's own memory
    host_bytes_per_s: float  # between device and host memory, one way
    usd_per_hour: float = 0.0  # 0: unknown
    product_share: float = 0.7  # of `flops` that large matrix products reach
    memory_share: float = 0.8  # of `memory_bytes_per_s` that memory-bound kernels reach


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of the same devices."""

    device: DeviceSpec
    per_node: int
    nodes: int
    inside: Link  # between two devices of a node
    across: Link  # of one device to another node

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.per_node * self.nodes

    def link_of(self, size: int, stride: int) -> Link:
        """Return the slowest link of a ring of `size` ranks that are `stride` apart.

        Ranks are numbered node by node; tp is the innermost axis, then dp_shard, dp_replicate, pp.
        """
        return self.inside if size * stride <= self.per_node else self.across


def parse_link(words: str, latency_s: float = _LATENCY_S) -> Link:
    """Parse 100mbit, or 1gbit,0.2ms: the bandwidth one way, and the latency of a message if it is given.

    Raises:
        InputError: The text has neither form.
    """
    rate, comma, latency = words.lower().partition(",")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", latency.strip())
    if comma and not found:
        raise InputError(
            f"{latency.strip()!r} is not a latency", hint="write 100mbit, 1gbit or 100mbit,0.2ms"
        )
    return Link(float(found[1]) * _SECONDS[found[2]] if found else latency_s, parse_rate(rate))


def device_names() -> list[str]:
    """Return the names of the devices of hardware.toml."""
    return list(_table())


def _near(name: str) -> str:
    """Return the devices whose names begin so, or else the nearest name."""
    begin = [known for known in device_names() if known.startswith(name)]
    return f"use {' or '.join(begin)}" if name and begin else nearest(name, device_names())


def load_cluster(
    gpus: int, gpu: str, nodes: int = 0, link: str | None = None, file: Path | None = None
) -> Cluster:
    """Return the cluster that options describe, or that of `file`, which replaces them all.

    `gpus` are the devices of a node if `nodes` is given, otherwise those in all, in nodes of the usual size.
    `link` is that of one device to another node, by default with the device's latency. Processes share a CPU
    evenly.

    Raises:
        InputError: An unknown device, an impossible number, or a file that is wrong, with the line.
    """
    if file is not None:
        return _read(file)
    if gpu not in _table():
        raise InputError(f"unknown device {gpu!r}", hint=_near(gpu))
    entry = _table()[gpu]
    if gpus < 1 or nodes < 0 or gpus * max(1, nodes) > _MOST_DEVICES:
        raise InputError(
            f"--gpus {gpus} --nodes {nodes}: must be 1 to {_MOST_DEVICES:,} devices in all",
            hint="for example --gpus 8 --nodes 4",
        )
    per_node = gpus if nodes or entry["kind"] == "cpu" else min(gpus, entry["per_node"])
    if gpus % per_node:
        raise InputError(
            f"--gpus {gpus} does not fill nodes of {per_node}",
            hint=f"give --nodes, or a multiple of {per_node}",
        )
    usual = parse_link(entry["across"])
    across = parse_link(link, usual.latency_s) if link else usual
    count = nodes or gpus // per_node
    return cluster_of(_device(gpu, entry), per_node, count, parse_link(entry["inside"]), across)


def cluster_of(device: DeviceSpec, per_node: int, nodes: int, inside: Link, across: Link) -> Cluster:
    """Return a cluster; the processes of a node share a CPU, which `device` is as a whole."""
    if device.kind == "cpu" and per_node > 1:
        device = replace(
            device,
            memory_bytes=device.memory_bytes / per_node,
            flops={name: rate / per_node for name, rate in device.flops.items()},
            memory_bytes_per_s=device.memory_bytes_per_s / per_node,
            host_bytes_per_s=device.host_bytes_per_s / per_node,
        )
    return Cluster(device, per_node, nodes, inside, across)


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("shoal.plan").joinpath("hardware.toml").read_text())


def _device(name: str, entry: Mapping[str, Any]) -> DeviceSpec:
    shares = {key: entry[key] for key in _OPTIONAL if key in entry}
    return DeviceSpec(
        name,
        entry["kind"],
        entry["memory_gib"] * 2**30,
        dict(entry["flops"]),
        entry["memory_bytes_per_s"],
        entry["host_bytes_per_s"],
        **shares,
    )


def _read(file: Path) -> Cluster:
    """Read a cluster file; each error names the file and, where there is one, the line."""
    text = read_toml(file)
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid TOML: {error}") from error

    def refuse(key: str, problem: str, hint: str = "") -> InputError:
        return InputError(f"{file}{line_of(text, key)}: {problem}", hint=hint)

    top = {"nodes", "per_node", "inside", "across", "device"}
    if unknown := sorted(given.keys() - top):
        raise refuse(unknown[0], f"unknown key {unknown[0]}", nearest(unknown[0], top))
    own = given.get("device")
    if not isinstance(own, dict):
        raise refuse("device", "a table [device] is needed", '[device], then like = "h100"')
    like = own.get("like")
    if like is not None and like not in _table():
        raise refuse("like", f"unknown device {like!r}", _near(str(like)))
    entry = {**(_table()[like] if like else {}), **own}
    entry |= {key: value for key, value in given.items() if key != "device"}
    for key, problem, hint in _problems(entry):
        raise refuse(key, problem, hint)
    links = {}
    for key in ("inside", "across"):
        usual = [parse_link(_table()[like][key]).latency_s] if like else []
        try:
            links[key] = parse_link(entry[key], *usual)
        except InputError as error:
            raise refuse(key, f"{key}: {error.message}", error.hint) from error
    device = _device(str(own.get("name", like or file.stem)), entry)
    return cluster_of(device, entry["per_node"], entry.get("nodes", 1), links["inside"], links["across"])


def _problems(entry: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what is wrong with the figures of a device: the key, the problem and the remedy."""
    known = {*_NUMBERS, *_WORDS, "per_node", "nodes", "flops"}
    found = [(key, f"unknown key {key}", nearest(key, known)) for key in entry if key not in known]
    needed = {*_NUMBERS, "kind", "inside", "across", "per_node", "flops"} - {*_OPTIONAL}
    found += [(key, f"{key} is missing", 'give it, or like = "h100"') for key in needed - entry.keys()]
    flops = entry.get("flops", {})
    if not isinstance(flops, dict) or "fp32" not in flops or flops.keys() - {*_FORMATS}:
        found.append(("flops", "flops needs fp32 and may have bf16 and fp16", "flops = { fp32 = 67e12 }"))
        flops = {}
    numbers = {key: (entry[key], most) for key, most in _NUMBERS.items() if key in entry}
    numbers |= {key: (value, _MOST_FLOPS) for key, value in flops.items()}
    for key, (value, most) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            found.append((key, f"{key} = {value!r} must be above 0 and at most {most:g}", ""))
    counts = {key: entry[key] for key in ("per_node", "nodes") if key in entry}
    for key, value in counts.items():
        if type(value) is not int or not 0 < value <= _MOST_DEVICES:
            found.append((key, f"{key} = {value!r} must be 1 to {_MOST_DEVICES:,}", ""))
    if not found and math.prod(counts.values()) > _MOST_DEVICES:
        total = counted(math.prod(counts.values()), "device")
        found.append(("nodes", f"{total} are more than {_MOST_DEVICES:,}", ""))
    if "kind" in entry and entry["kind"] not in ("cuda", "cpu"):
        found.append(("kind", f"kind = {entry['kind']!r} must be cuda or cpu", ""))
    words = [key for key in _WORDS if not isinstance(entry.get(key, ""), str)]
    return found + [(key, f"{key} must be text", "") for key in words]
