"""Checks between hosts: judged from what hosts would tell, and run by real ones in network namespaces."""

from __future__ import annotations

import fcntl
import json
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from shoal.bench.hosts import NAMES, TwoHosts
from shoal.doctor import hosts
from shoal.runtime.network import Endpoint
from tests.tiny_dataset import random_dataset
from tests.two_hosts import two_hosts

__all__ = ["two_hosts"]  # a fixture


def test_a_host_that_does_not_reach_another_is_named_with_the_direction():
    fine = {"offset": 0.0}
    assert hosts.judge_reach(["a", "b"], [[fine, fine], [fine, fine]]).status == "ok"
    refused = {"error": "timed out", "where": "10.0.0.1:40001"}
    finding = hosts.judge_reach(["a", "b"], [[fine, fine], [refused, fine]])
    assert (finding.status, finding.fact) == ("problem", "b does not reach a at 10.0.0.1:40001: timed out")


def test_a_clock_that_is_ahead_is_named_with_its_lead():
    views = [[{"offset": 0.0}, {"offset": 0.003}, {"error": "x", "where": "y"}], [], []]
    finding = hosts.judge_clocks(["a", "b", "c"], views)
    assert (finding.status, finding.fact) == ("ok", "from a's: b +3 ms")
    views[0][1] = {"offset": -4.0}
    finding = hosts.judge_clocks(["a", "b", "c"], views)
    assert (finding.status, "b -4000 ms" in finding.fact) == ("warning", True)


def test_another_hosts_clock_is_read_and_one_that_does_not_answer_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(json.dumps(time.time() + 5).encode())

        thread = threading.Thread(target=answer)
        thread.start()
        assert hosts.ask_clock("127.0.0.1", port)["offset"] == pytest.approx(5, abs=0.5)
        thread.join()
    assert hosts.ask_clock("127.0.0.1", port)["where"] == f"127.0.0.1:{port}"


def test_a_folder_of_its_own_on_each_host_is_told_and_is_no_problem():
    finding = hosts.judge_folder("/runs", ["a", "b"], [(True, True), (False, False)])
    assert (finding.status, finding.fact) == ("ok", "/runs of a is not seen on b")
    assert hosts.judge_folder("/runs", ["a", "b"], [(True, True)] * 2).status == "ok"
    finding = hosts.judge_folder("/runs", ["a", "b"], [(True, True), (True, False)])
    assert (finding.status, "a's lock does not keep b out" in finding.fact) == ("warning", True)


def test_locks_that_keep_nobody_out_are_a_warning(tmp_path, monkeypatch):
    assert hosts.check_locks(tmp_path).status == "ok"
    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)
    assert hosts.check_locks(tmp_path).status == "warning"
    assert list(tmp_path.iterdir()) == []

    def refuse(handle, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "takes no lock: Operation not supported" in hosts.check_locks(tmp_path).fact
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_that_is_not_there_is_a_problem_also_where_all_hosts_lack_it(tmp_path):
    finding = hosts.check_dataset(random_dataset(tmp_path / "walk"))
    assert (finding.check, finding.status) == (f"dataset {tmp_path / 'walk'}", "ok")
    assert hosts.check_dataset(tmp_path / "none").status == "problem"


def test_an_interface_set_by_hand_that_leads_elsewhere_is_a_warning():
    assert hosts.check_interface("127.0.0.1", chosen="").status == "ok"
    finding = hosts.check_interface("127.0.0.1", chosen="docker0")
    assert (finding.status, "GLOO_SOCKET_IFNAME = docker0" in finding.fact) == ("warning", True)


def diagnose(two_hosts: TwoHosts, folders: dict[str, Path]) -> tuple[list[dict], dict[str, dict]]:
    """Run `shoal doctor` on both hosts; return exit statuses, and what each found, by check."""
    words = [sys.executable, "-m", "shoal", "doctor", "--nnodes", "2", "--rdzv", two_hosts.rdzv]
    processes = {
        name: two_hosts.start(
            name, [*words, "--json", f"{name}.json", "--data", "walk"], folders[name], COLUMNS="200"
        )
        for name in NAMES
    }
    screens = {name: process.communicate(timeout=120)[0] for name, process in processes.items()}
    found = {}
    for name in NAMES:
        file = folders[name] / f"{name}.json"
        assert file.exists(), screens[name]
        found[name] = {finding["check"]: finding for finding in json.loads(file.read_text())["findings"]}
    return [process.returncode for process in processes.values()], found


@pytest.mark.proof
def test_two_sound_hosts_with_a_shared_folder(two_hosts, tmp_path):
    random_dataset(tmp_path / "walk")
    statuses, found = diagnose(two_hosts, dict.fromkeys(NAMES, tmp_path))
    for name in NAMES:
        for check in ("interface", "ports", "clocks", "versions and data", "shared folder", "back end"):
            assert found[name][check]["status"] == "ok", found[name][check]
        assert "all 2 hosts reach each other" in found[name]["ports"]["fact"]
        assert found[name]["shared folder"]["fact"] == f"{tmp_path} is the same on all hosts, locks work"
        assert found[name]["interface"]["fact"].startswith("cable (10.77.0.")
    assert found["north"]["clocks"] == found["south"]["clocks"]
    assert not list(tmp_path.glob(".shoal-doctor-*"))
    assert statuses == [0, 0]


@pytest.mark.proof
def test_other_data_and_folders_of_their_own_are_told_on_both_hosts(two_hosts, tmp_path):
    folders = {name: tmp_path / name for name in NAMES}
    for seed, folder in enumerate(folders.values()):
        random_dataset(folder / "walk", seed=seed)
    statuses, found = diagnose(two_hosts, folders)
    for name in NAMES:
        assert "dataset walk differs: " in found[name]["versions and data"]["fact"]
        assert "is not seen on south" in found[name]["shared folder"]["fact"]
    assert statuses == [1, 1]


def test_hosts_that_cannot_meet_are_a_problem_with_the_address(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "MEETING_LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    [finding] = hosts.check_hosts(Endpoint(2, "127.0.0.1", port, 1), tmp_path, [])
    assert (finding.status, "loopback" in finding.fact) == ("problem", True)
    [finding] = hosts.check_hosts(Endpoint(2, "192.0.2.1", port, 1), tmp_path, [])
    assert finding.status == "problem"
    assert "192.0.2.1" in finding.fact
