"""Clocks, throttling, memory and power, read each second while a row is measured.

A sensor that a machine lacks, or does not show to this user, is absent from the record.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_PERIOD_S = 1.0
_LEAST_READINGS = 3  # within the timed steps; of fewer, no energy is told
# Busy percent, watts, MHz, MiB, and a mask of the reasons for a lower clock; a line a GPU and second.
_GPU_FIELDS = "index,utilization.gpu,power.draw,clocks.sm,memory.used,clocks_throttle_reasons.active"
_GPU_QUERY = (f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits", "-lms", f"{_PERIOD_S * 1e3:.0f}")
_GPU_SLOWED = 0x8 | 0x20 | 0x40 | 0x80  # NVML's masks of slowdowns by heat or hardware


@dataclass
class Watch:
    """Context in which sensors are read, with the memory of the children of a process, and of theirs."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    gpu_program: str = "nvidia-smi"
    parent: int = field(default_factory=os.getpid)
    readings: list[dict[str, float]] = field(default_factory=list)
    _joules: float = 0.0
    _counters: dict[Path, float] = field(default_factory=dict)
    _gpus: dict[str, tuple[float, ...]] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._threads = [threading.Thread(target=self._repeat, daemon=True)]
        self._program: subprocess.Popen[str] | None = None
        if shutil.which(self.gpu_program):
            words = [self.gpu_program, *_GPU_QUERY]
            self._program = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._threads.append(threading.Thread(target=self._listen, args=[self._program], daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._program:
            self._program.terminate()
            self._program.wait()
        for thread in self._threads:
            thread.join()

    def _repeat(self) -> None:
        while not self._ended.is_set():
            self.readings.append(self.read(time.time()))
            self._ended.wait(_PERIOD_S)

    def _listen(self, program: subprocess.Popen[str]) -> None:
        for line in program.stdout or ():
            with contextlib.suppress(ValueError):  # a sensor that is not there: [N/A]
                index, busy, watts, mhz, mib, mask = line.split(", ")
                slowed = bool(int(mask, 16) & _GPU_SLOWED)
                self._gpus[index] = float(busy), float(watts), float(mhz), float(mib), slowed

    def read(self, now: float) -> dict[str, float]:
        """Read every sensor once; energy is that since the first reading."""
        cpus = self.sys / "devices/system/cpu"
        clocks = [1e-3 * kilohertz for kilohertz in _numbers(cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))]
        found = {"time": now, "cpu_mhz": max(clocks or self._cpuinfo(), default=math.nan)}
        throttled = list(_numbers(cpus.glob("cpu[0-9]*/thermal_throttle/*_throttle_count")))
        found["cpu_throttled"] = sum(throttled) if throttled else math.nan
        found["cpu_joules"] = self._energy()
        memory = [rss for pid in self._descendants() for rss in self._fields(f"{pid}/status", "VmRSS")]
        found["resident_bytes"] = 1024 * sum(memory) if memory else math.nan
        if busy := [gpu for gpu in self._gpus.values() if gpu[0]]:
            watts, mhz, mib, slowed = list(zip(*busy, strict=True))[1:]
            found |= {"gpu_watts": sum(watts), "gpu_mhz": min(mhz), "gpu_bytes": sum(mib) * 2**20}
            found["gpu_throttled"] = sum(slowed)
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _energy(self) -> float:
        """Return the joules of packages and memory so far; a counter is 0 again after its largest value."""
        zones = [
            zone
            for zone in (self.sys / "class/powercap").glob("intel-rapl:*")
            if _text(zone / "name").startswith(("package", "dram"))  # others are parts of these, or the whole
        ]
        counters = {zone: value for zone in zones for value in _numbers([zone / "energy_uj"])}
        for zone, value in counters.items():
            passed = value - self._counters.get(zone, value)
            wrapped = passed < 0 and next(_numbers([zone / "max_energy_range_uj"]), 0.0)
            self._joules += 1e-6 * (passed + wrapped)
        self._counters = counters
        return self._joules if counters else math.nan

    def _cpuinfo(self) -> list[float]:
        return list(self._fields("cpuinfo", "cpu MHz"))

    def _fields(self, file: str, name: str) -> Iterator[float]:
        for line in _text(self.proc / file).splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                yield float(value.split()[0])

    def _descendants(self) -> set[int]:
        """Return the children of the parent, and theirs, in the order of their numbers.

        Processes older than the parent are read only if there is no child among the newer ones: reading all
        takes time, and numbers begin anew after the largest.
        """
        pids = sorted(int(folder.name) for folder in self.proc.iterdir() if folder.name.isdigit())
        first, family = bisect.bisect(pids, self.parent), {self.parent}
        for group in (pids[first:], pids[:first]):
            for pid in group if len(family) == 1 else ():
                after_name = _text(self.proc / f"{pid}/stat").rpartition(")")[2].split()
                if after_name and int(after_name[1]) in family:
                    family.add(pid)
        return family - {self.parent}

    def told(self, began: float, ended: float, num_samples: int) -> dict[str, Any]:
        """Return the readings as columns, and mean power and energy a sample between two times."""
        names = dict.fromkeys(name for reading in self.readings for name in reading)
        columns: dict[str, Any] = {
            name: [reading.get(name) for reading in self.readings] for name in names if name != "time"
        }
        if not columns:
            return {}
        times = [reading["time"] for reading in self.readings]
        columns["seconds"] = [round(time - times[0], 3) for time in times]
        within = [began <= time <= ended for time in times]
        if sum(within) >= _LEAST_READINGS and None not in columns.get("cpu_joules", [None]):
            joules = float(np.diff(np.interp([began, ended], times, columns["cpu_joules"]))[0])
            columns |= _power("cpu", joules, ended - began, num_samples)
        watts = [w for w, inside in zip(columns.get("gpu_watts", ()), within, strict=False) if inside and w]
        if len(watts) >= _LEAST_READINGS:
            columns |= _power("gpu", float(np.mean(watts)) * (ended - began), ended - began, num_samples)
        return columns


def _power(device: str, joules: float, seconds: float, num_samples: int) -> Mapping[str, float]:
    return {f"mean_{device}_watts": joules / seconds, f"{device}_joules_a_sample": joules / num_samples}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _numbers(paths: Any) -> Iterator[float]:
    for path in paths:
        with contextlib.suppress(ValueError):
            yield float(_text(path))
