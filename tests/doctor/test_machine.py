"""Each check judges what it is given; the two-process start is a real one."""

from __future__ import annotations

import sys

import pytest

from shoal.doctor import machine

GB = 10**9


def test_old_python_is_a_problem():
    assert machine.check_python((3, 10, 4)).status == "problem"
    assert machine.check_python((3, 11, 0)).status == "ok"


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1", "problem"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok")]
)
def test_torch_is_judged_by_its_version(version, status):
    assert machine.check_torch(lambda: version).status == status


def test_torch_that_does_not_start_is_a_problem_with_its_reason():
    def broken():
        raise OSError("libtorch.so: wrong ELF class")

    finding = machine.check_torch(broken)
    assert finding.status == "problem"
    assert "wrong ELF class" in finding.fact
    assert "make setup" in finding.advice


def test_nvidia_driver_without_a_cuda_torch_is_a_warning():
    assert machine.check_devices([], has_nvidia=True).status == "warning"
    assert machine.check_devices([], has_nvidia=False).status == "ok"
    assert "2 CUDA: H200" in machine.check_devices(["H200", "H200"], has_nvidia=True).fact


def test_the_format_of_products_is_told_and_which_would_be_slow():
    slow = "fp16 in software: some 50 times slower"
    assert machine.check_bf16(native=False, on_gpu=False).fact == f"native: no, auto takes fp32; {slow}"
    assert machine.check_bf16(native=True, on_gpu=False).fact == f"native: yes, auto takes bf16; {slow}"
    assert machine.check_bf16(native=True, on_gpu=True).fact == "native: yes, auto takes bf16"


def test_more_threads_than_cores_is_a_warning_that_names_the_cause(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    finding = machine.check_cores(physical=2, allowed=4, load=0)
    assert finding.status == "warning"
    assert "lower OMP_NUM_THREADS to 2" in finding.advice


def test_cores_are_divided_among_workers_and_load_is_seen(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert machine.check_cores(physical=64, allowed=128, load=0).status == "ok"
    assert "load 9.5" in machine.check_cores(physical=4, allowed=8, load=9.5).fact
    assert "share one core" in machine.check_cores(physical=1, allowed=1, load=0).advice


def test_container_memory_limit_counts_as_the_memory_there_is():
    assert machine.check_memory(total=64 * GB, available=60 * GB).status == "ok"
    limited = machine.check_memory(total=64 * GB, available=60 * GB, limit=2 * GB)
    assert (limited.status, "limited to 2.0 GB" in limited.fact) == ("warning", True)
    assert machine.check_memory(total=64 * GB, available=GB // 2).status == "problem"


def test_disk_is_written_and_left_clean(tmp_path):
    finding = machine.check_disk(tmp_path, free=50 * GB, probe_bytes=1 << 20)
    assert "MB/s" in finding.fact
    assert list(tmp_path.iterdir()) == []
    assert machine.check_disk(tmp_path, free=GB, probe_bytes=1 << 20).status == "warning"
    assert machine.check_disk(tmp_path, free=10, probe_bytes=1 << 20).status == "problem"


def test_unwritable_folder_is_a_problem_with_the_systems_reason(tmp_path, monkeypatch):
    def refuse(folder, num_bytes):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine, "_write_rate", refuse)
    finding = machine.check_disk(tmp_path, free=50 * GB)
    assert (finding.status, "Permission denied" in finding.fact) == ("problem", True)


def test_missing_extra_comes_with_the_pip_command():
    requirements = ["numpy>=2", "pytest; extra == 'data'", "no-such-thing>=1; extra == 'report'"]
    finding = machine.check_extras(requirements)
    assert finding.status == "warning"
    assert "report lacks no-such-thing; complete: data" in finding.fact
    assert finding.advice == "pip install 'shoal[report]'"


def test_two_processes_start_meet_and_agree():
    finding = machine.check_two_processes()
    assert finding.status in ("ok", "warning"), finding  # a slow start is a warning
    assert "all_reduce" in finding.fact


def test_rank_that_fails_is_reported_with_its_last_words():
    command = [sys.executable, "-c", "raise SystemExit('the cable is out')"]
    finding = machine.check_two_processes(command)
    assert finding.status == "problem"
    assert "the cable is out" in finding.fact


def test_ranks_that_never_meet_are_given_up(monkeypatch):
    monkeypatch.setattr(machine, "START_LIMIT_S", 0.5)
    finding = machine.check_two_processes([sys.executable, "-c", "import time; time.sleep(30)"])
    assert (finding.status, "did not meet" in finding.fact) == ("problem", True)
