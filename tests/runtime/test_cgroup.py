"""Limits of control groups as Linux, Docker, Slurm and Kubernetes lay them out, from made-up files."""

import os
from pathlib import Path

import pytest
import torch

from shoal.doctor import machine
from shoal.runtime import cgroup, cores, memory

NO_LIMIT = str(2**63 - 4096)  # in v1's words
GB = 10**9


def lay(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Write /proc/self/cgroup and the files of groups; return both places."""
    (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder / "own", folder / "root"


V1 = "12:cpuset:/a/b\n5:memory:/a/b\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a/b\n"

MEMORY = {
    "none": ("", {}, None),
    "v2, no limit": ("0::/\n", {"memory.max": "max"}, None),
    "v2, own": ("0::/\n", {"memory.max": "5000"}, 5000),
    "v2, own below": ("0::/a/b\n", {"a/memory.max": "max", "a/b/memory.max": "5000"}, 5000),
    "v2, above": ("0::/a/b\n", {"a/memory.max": "4000", "a/b/memory.max": "max"}, 4000),
    "v2, smallest": ("0::/a/b\n", {"a/memory.max": "4000", "a/b/memory.max": "5000"}, 4000),
    "v2, inner smaller": ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "4000"}, 4000),
    "v2, beside": ("0::/a\n", {"a/memory.max": "max", "b/memory.max": "4000"}, None),
    "v2, path of the host": ("0::/docker/0123\n", {"memory.max": "4000"}, 4000),
    "v2, garbled": ("0::/\n", {"memory.max": "lots"}, None),
    "v1, no limit": (V1, {"memory/a/b/memory.limit_in_bytes": NO_LIMIT}, None),
    "v1, own": (V1, {"memory/a/b/memory.limit_in_bytes": "5000"}, 5000),
    "v1, above": (
        V1,
        {"memory/a/b/memory.limit_in_bytes": NO_LIMIT, "memory/a/memory.limit_in_bytes": "4000"},
        4000,
    ),
    "v1, path of the host": (V1, {"memory/memory.limit_in_bytes": "4000"}, 4000),
    "both": (
        "5:memory:/a\n0::/a\n",
        {"memory/a/memory.limit_in_bytes": "4000", "unified/a/memory.max": "3000"},
        3000,
    ),
}


@pytest.mark.parametrize(("own", "files", "expected"), MEMORY.values(), ids=MEMORY)
def test_the_smallest_memory_limit_counts(tmp_path, own, files, expected):
    assert cgroup.memory_limit(*lay(tmp_path, own, files)) == expected


CPU = {
    "none": ("", {}, None),
    "v2, no limit": ("0::/\n", {"cpu.max": "max 100000"}, None),
    "v2, own": ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),
    "v2, other period": ("0::/\n", {"cpu.max": "20000 5000"}, 4),
    "v2, above": ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
    "v2, smallest": ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
    "v1, no limit": (
        V1,
        {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000"},
        None,
    ),
    "v1, own": (
        V1,
        {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000"},
        3,
    ),
    "v1, linked name": (
        V1,
        {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"},
        1.5,
    ),
}


@pytest.mark.parametrize(("own", "files", "expected"), CPU.values(), ids=CPU)
def test_the_smallest_quota_of_cores_counts(tmp_path, own, files, expected):
    assert cgroup.cpu_limit(*lay(tmp_path, own, files)) == expected


@pytest.mark.parametrize(
    ("cpuset", "quota", "expected"),
    [(8, None, 8), (8, 2.5, 2), (2, 6.0, 2), (8, 0.5, 1), (3, 3.0, 3)],
)
def test_a_process_counts_the_cores_that_cpuset_and_quota_both_allow(monkeypatch, cpuset, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpuset)), raising=False)
    monkeypatch.setattr(cores, "cpu_limit", lambda: quota)
    assert cores.logical_cores() == expected
    assert cores.physical_cores() <= expected


def test_the_doctor_reads_the_limit_of_the_groups(monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: 2 * GB)
    found = machine.check_memory(total=64 * GB, available=60 * GB)
    assert (found.status, "limited to 2.0 GB by the cgroup" in found.fact) == ("warning", True)


def test_new_tensors_get_no_more_than_a_container_has(monkeypatch):
    there = memory.free_memory(torch.device("cpu"))
    monkeypatch.setattr(memory, "memory_limit", lambda: there // 8)
    assert memory.free_memory(torch.device("cpu")) == there // 8
