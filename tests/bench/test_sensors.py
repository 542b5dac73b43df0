"""Sensors: exact joules of a made-up /sys tree, the memory of a process and its children, a GPU's program."""

import json
import os
import subprocess
import sys
import time

import pytest

from shoal.bench import networks, sensors
from shoal.bench.frameworks import harness
from shoal.bench.networks import Cell, NetworksOptions
from shoal.bench.sensors import Watch


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def zone(folder, number, name, energy, largest=1_000_000):
    path = folder / f"class/powercap/intel-rapl:{number}"
    write(path, name=name, energy_uj=energy, max_energy_range_uj=largest)


@pytest.fixture
def machine(tmp_path):
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    proc.mkdir(), sys.mkdir()
    return Watch(sys=sys, proc=proc, gpu_program=str(tmp_path / "no-such-program"), parent=10)


def test_joules_are_those_of_packages_and_memory_and_survive_the_counter_s_wrap_around(machine):
    for step, (package, dram) in enumerate([(100, 900_000), (500_100, 999_999), (300_100, 99_999)]):
        zone(machine.sys, "0", "package-0", package)
        zone(machine.sys, "0:1", "dram", dram)
        zone(machine.sys, "0:0", "core", 7 * package)  # a part of the package
        zone(machine.sys, "1", "psys", 9 * package)  # the whole machine
        machine.readings.append(machine.read(float(step)))
    told = machine.told(0.0, 2.0, 10)
    assert told["cpu_joules"] == pytest.approx([0.0, 0.599999, 0.599999 + 0.8 + 0.1])
    assert told["mean_cpu_watts"] == pytest.approx(1.499999 / 2)
    assert told["cpu_joules_a_sample"] == pytest.approx(0.1499999)


def test_energy_is_that_of_the_timed_steps_and_of_few_readings_none_is_told(machine):
    for step, microjoules in enumerate([0, 100_000, 200_000, 300_000, 400_000]):
        zone(machine.sys, "0", "package-0", microjoules)
        machine.readings.append(machine.read(float(step)))
    told = machine.told(0.5, 3.5, 3)  # 1, 2 and 3 are within
    assert told["cpu_joules_a_sample"] == pytest.approx(0.1)
    assert "cpu_joules_a_sample" not in machine.told(0.5, 2.5, 2)


def test_a_machine_that_tells_nothing_has_nothing_in_its_record(machine):
    machine.readings.append(machine.read(1.0))
    assert machine.readings == [{"time": 1.0}]
    assert machine.told(0.0, 2.0, 1) == {}


def test_an_energy_counter_that_this_user_may_not_read_is_absent(machine):
    zone(machine.sys, "0", "package-0", "")
    assert "cpu_joules" not in machine.read(1.0)


def test_clocks_throttling_and_the_memory_of_the_process_and_its_children(machine):
    cpu = machine.sys / "devices/system/cpu"
    for number, kilohertz in enumerate((2_500_000, 3_100_000)):
        write(cpu / f"cpu{number}", cpufreq__scaling_cur_freq=kilohertz)
        write(cpu / f"cpu{number}/thermal_throttle", core_throttle_count=2, package_throttle_count=3)
    for pid, parent, kilobytes in ((9, 10, 1), (10, 1, 2), (11, 10, 4), (12, 11, 8), (13, 1, 16)):
        write(
            machine.proc / str(pid), stat=f"{pid} (a) name) S {parent} 1 1", status=f"VmRSS:\t{kilobytes} kB"
        )
    assert machine.read(1.0) == {
        "time": 1.0,
        "cpu_mhz": 3100.0,
        "cpu_throttled": 10,
        "resident_bytes": 12 * 1024,
    }


def test_a_child_is_found_after_the_numbers_of_processes_began_anew(machine):
    for pid, parent, kilobytes in ((1, 0, 1), (3, 10, 4), (4, 3, 8), (10, 1, 2), (13, 1, 16)):
        write(machine.proc / str(pid), stat=f"{pid} (a) S {parent} 1 1", status=f"VmRSS:\t{kilobytes} kB")
    assert machine.read(1.0) == {"time": 1.0, "resident_bytes": 12 * 1024}


def test_without_cpufreq_the_clock_is_that_of_cpuinfo(machine):
    write(machine.proc, cpuinfo="processor : 0\ncpu MHz\t\t: 2596.148\nprocessor : 1\ncpu MHz\t\t: 2600.5")
    assert machine.read(1.0) == {"time": 1.0, "cpu_mhz": 2600.5}


def test_a_gpu_that_works_is_in_the_record_and_an_idle_one_is_not(machine, tmp_path):
    program = tmp_path / "nvidia-smi"
    lines = (
        "0, 90, 300.5, 1700, 2048, 0x0000000000000040",
        "1, 0, 60.0, 300, 1, 0x1",
        "2, [N/A], 1, 1, 1, 0x0",
    )
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + "exec sleep 60\n")
    program.chmod(0o755)
    machine.gpu_program = str(program)
    with machine:
        until = time.monotonic() + 20
        while len(machine._gpus) < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        told = machine.read(5.0)
    assert {name: value for name, value in told.items() if name.startswith("gpu")} == {
        "gpu_watts": 300.5,
        "gpu_mhz": 1700.0,
        "gpu_bytes": 2 << 30,
        "gpu_throttled": 1,
    }
    machine.readings = [told | {"time": float(second)} for second in range(4)]
    assert machine.told(0.0, 3.0, 3)["gpu_joules_a_sample"] == pytest.approx(300.5)


def test_a_child_of_this_process_is_watched(monkeypatch):
    monkeypatch.setattr(sensors, "_PERIOD_S", 0.05)
    began = time.time()
    with Watch(gpu_program="no-such-program") as watch:
        subprocess.run(
            [sys.executable, "-c", "import time; x = bytes(range(256)) * 200_000; time.sleep(1)"], check=True
        )
    told = watch.told(began, time.time(), 1)
    assert max(filter(None, told["resident_bytes"])) > 50e6
    assert len(told["seconds"]) == len(told["resident_bytes"]) > 3


def test_the_peak_is_that_of_the_process_itself(tmp_path):
    assert harness.peak_bytes() > 1 << 20
    write(tmp_path, status="VmPeak:\t  9 kB\nVmHWM:\t  5 kB")
    assert harness.peak_bytes(str(tmp_path / "status")) == 5 * 1024
    assert harness.peak_bytes(str(tmp_path / "none")) == 0


def test_a_row_has_what_its_sensors_told(monkeypatch, tmp_path):
    events = ['{"event": "built", "parameters": 1, "versions": {}}']
    events += ['{"event": "identity", "loss": 1.0, "gradient_norm": 1.0}']
    timed = {"samples": [1.0, 1.0], "reads": [0.0, 0.0], "total_s": 2.0, "losses": [], "ended": 9.0}
    timed["peak_bytes"] = 7
    events.append(json.dumps({"event": "timed", **timed}))
    asked = []
    monkeypatch.setattr(Watch, "told", lambda self, *asked_for: asked.append(asked_for) or {"cpu_mhz": [1.0]})
    (tmp_path / "events").write_text("\n".join(events))
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat {tmp_path / 'events'}\n")
    program.chmod(0o755)
    options = NetworksOptions(("net",), pythons={"pytorch": str(program)})
    row = networks.run_adapter(Cell("net", "pytorch", "default", 4, 1), {}, options, tmp_path)
    assert (row.status, row.peak_bytes, row.sensors) == ("done", 7, {"cpu_mhz": [1.0]})
    assert asked == [(7.0, 9.0, 8)]
    assert os.path.exists(tmp_path / "job.json")
