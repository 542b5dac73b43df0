"""What `shoal doctor` runs, prints and returns."""

from __future__ import annotations

import json

from shoal.doctor import command, machine
from shoal.doctor.machine import Finding


def only(monkeypatch, finding):
    monkeypatch.setattr(command, "diagnose", lambda folder, place, datasets: ([finding], {}))


def test_a_problem_is_exit_status_1_and_reaches_the_json_file(tmp_path, monkeypatch, capsys):
    only(monkeypatch, Finding("disk", "problem", "[nothing] left", "free some space"))
    assert command.doctor(tmp_path / "out.json") == 1
    assert json.loads((tmp_path / "out.json").read_text())["findings"][0]["advice"] == "free some space"
    assert "[nothing] left" in capsys.readouterr().out


def test_warnings_alone_are_exit_status_0(monkeypatch):
    only(monkeypatch, Finding("cores", "warning", "", ""))
    assert command.doctor(None) == 0


def test_broken_torch_still_gets_the_other_checks(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "check_torch", lambda: Finding("torch", "problem", "does not start"))
    checks = [finding.check for finding in command.diagnose(tmp_path)[0]]
    assert {"memory", "locks", "/dev/shm"} <= set(checks)
    assert "2 processes" not in checks


def test_where_two_processes_do_not_meet_no_back_end_is_blamed(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "check_two_processes", lambda: Finding("2 processes", "problem", "no"))
    assert "back end" not in [finding.check for finding in command.diagnose(tmp_path)[0]]
