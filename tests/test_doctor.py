"""Each check judges what it is given; the two-process start is a real one."""

from __future__ import annotations

import json
import sys

import pytest

from shoal import doctor

GB = 10**9


def test_old_python_is_a_problem():
    assert doctor.check_python((3, 10, 4)).status == "problem"
    assert doctor.check_python((3, 11, 0)).status == "ok"


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1", "problem"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok")]
)
def test_torch_is_judged_by_its_version(version, status):
    assert doctor.check_torch(lambda: version).status == status


def test_torch_that_does_not_start_is_a_problem_with_its_reason():
    def broken():
        raise OSError("libtorch.so: wrong ELF class")

    finding = doctor.check_torch(broken)
    assert finding.status == "problem"
    assert "wrong ELF class" in finding.fact
    assert "make setup" in finding.advice


def test_nvidia_driver_without_a_cuda_torch_is_a_warning():
    assert doctor.check_devices([], has_nvidia=True).status == "warning"
    assert doctor.check_devices([], has_nvidia=False).status == "ok"
    assert "2 CUDA: H200" in doctor.check_devices(["H200", "H200"], has_nvidia=True).fact


def test_more_threads_than_cores_is_a_warning_that_names_the_cause(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    finding = doctor.check_cores(physical=2, allowed=4, load=0)
    assert finding.status == "warning"
    assert "lower OMP_NUM_THREADS to 2" in finding.advice


def test_cores_are_divided_among_workers_and_load_is_seen(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert doctor.check_cores(physical=64, allowed=128, load=0).status == "ok"
    assert "load 9.5" in doctor.check_cores(physical=4, allowed=8, load=9.5).fact
    assert "share one core" in doctor.check_cores(physical=1, allowed=1, load=0).advice


def test_container_memory_limit_counts_as_the_memory_there_is():
    assert doctor.check_memory(total=64 * GB, available=60 * GB).status == "ok"
    limited = doctor.check_memory(total=64 * GB, available=60 * GB, limit=2 * GB)
    assert (limited.status, "limited to 2.0 GB" in limited.fact) == ("warning", True)
    assert doctor.check_memory(total=64 * GB, available=GB // 2).status == "problem"


def test_smallest_cgroup_limit_on_the_way_up_is_read(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor._cgroup_memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("123456789\n")
    assert doctor._cgroup_memory_limit(tmp_path) == 123456789


def test_disk_is_written_and_left_clean(tmp_path):
    finding = doctor.check_disk(tmp_path, free=50 * GB, probe_bytes=1 << 20)
    assert "MB/s" in finding.fact
    assert list(tmp_path.iterdir()) == []
    assert doctor.check_disk(tmp_path, free=GB, probe_bytes=1 << 20).status == "warning"
    assert doctor.check_disk(tmp_path, free=10, probe_bytes=1 << 20).status == "problem"


def test_unwritable_folder_is_a_problem_with_the_systems_reason(tmp_path, monkeypatch):
    def refuse(folder, num_bytes):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "_write_rate", refuse)
    finding = doctor.check_disk(tmp_path, free=50 * GB)
    assert (finding.status, "Permission denied" in finding.fact) == ("problem", True)


def test_missing_extra_comes_with_the_pip_command():
    requirements = ["numpy>=2", "pytest; extra == 'data'", "no-such-thing>=1; extra == 'report'"]
    finding = doctor.check_extras(requirements)
    assert finding.status == "warning"
    assert "report lacks no-such-thing; complete: data" in finding.fact
    assert finding.advice == "pip install 'shoal[report]'"


def test_two_processes_start_meet_and_agree():
    finding = doctor.check_two_processes()
    assert finding.status in ("ok", "warning"), finding  # a slow start is a warning
    assert "all_reduce" in finding.fact


def test_rank_that_fails_is_reported_with_its_last_words():
    command = [sys.executable, "-c", "raise SystemExit('the cable is out')"]
    finding = doctor.check_two_processes(command)
    assert finding.status == "problem"
    assert "the cable is out" in finding.fact


def test_ranks_that_never_meet_are_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "START_LIMIT_S", 0.5)
    finding = doctor.check_two_processes([sys.executable, "-c", "import time; time.sleep(30)"])
    assert (finding.status, "did not meet" in finding.fact) == ("problem", True)


def test_a_problem_is_exit_status_1_and_reaches_the_json_file(tmp_path, monkeypatch, capsys):
    problem = doctor.Finding("disk", "problem", "[nothing] left", "free some space")
    monkeypatch.setattr(doctor, "diagnose", lambda folder: [problem])
    assert doctor.doctor(tmp_path / "out.json") == 1
    assert json.loads((tmp_path / "out.json").read_text())[0]["advice"] == "free some space"
    assert "[nothing] left" in capsys.readouterr().out


def test_warnings_alone_are_exit_status_0(monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda folder: [doctor.Finding("cores", "warning", "", "")])
    assert doctor.doctor(None) == 0


def test_broken_torch_still_gets_the_other_checks(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "check_torch", lambda: doctor.Finding("torch", "problem", "does not start"))
    checks = [finding.check for finding in doctor.diagnose(tmp_path)]
    assert "memory" in checks
    assert "2 processes" not in checks
