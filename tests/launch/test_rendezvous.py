"""Hosts that meet, fail together and get lost, as threads of one process; networks and addresses judged."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shoal.errors import ConfigError, InputError, ShoalError
from shoal.launch import rendezvous
from shoal.launch.rendezvous import Rendezvous
from shoal.runtime import network
from shoal.runtime.device import Device, choose_backend
from shoal.runtime.failure import Failure
from shoal.runtime.network import Endpoint
from shoal.runtime.rank_info import read_rank_info


@pytest.fixture
def meet(monkeypatch):
    """Return a function that makes some nodes meet, on loopback for once; with what each has to say."""
    monkeypatch.setattr(network, "refuse_loopback", lambda address, given: None)
    monkeypatch.setattr(rendezvous, "LOST_S", 1.0)
    monkeypatch.setattr(rendezvous, "_LEAVE_S", 1.0)
    met = []

    def run(nnodes, *, nodes=None, nprocs=None, timeout_s=10.0, plans=None):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        nodes = range(nnodes) if nodes is None else nodes
        with ThreadPoolExecutor(nnodes) as threads:
            futures = [
                threads.submit(
                    Rendezvous,
                    Endpoint((plans or [nnodes] * nnodes)[index], "127.0.0.1", port, node),
                    (nprocs or [1] * nnodes)[index],
                    timeout_s,
                )
                for index, node in enumerate(nodes)
            ]
        met.extend(future.result() for future in futures if future.exception() is None)
        return [future.exception() or future.result() for future in futures]

    yield run
    with ThreadPoolExecutor(len(met) or 1) as threads:
        list(threads.map(lambda one: one.shutdown(), met))


def together(nodes, work):
    """Return what `work` gave for each node, all at the same time."""
    with ThreadPoolExecutor(len(nodes)) as threads:
        return list(threads.map(work, nodes))


def test_ranks_are_counted_node_by_node(meet):
    nodes = meet(3, nprocs=[1, 4, 2])
    assert [node.world_size for node in nodes] == [7, 7, 7]
    assert "this is node 1, ranks 1 to 4" in nodes[1].describe()
    assert [info.rank for info in together(nodes, lambda node: node.next_rendezvous())] == [0, 1, 2]


def test_a_failure_on_one_host_ends_the_attempt_on_all_with_one_cause(meet):
    north, south = meet(2)
    together([north, south], lambda node: node.next_rendezvous())
    assert not north.disturbed()
    told = together(
        [
            (north, Failure(0, 1.0, "rank 0: connection closed", secondary=True)),
            (south, Failure(2, 9.0, "rank 2 failed")),
        ],
        lambda pair: pair[0].agree_on_cause(pair[1], f"seen with {pair[1].rank}"),
    )
    assert [failure.sentence for failure, _ in told] == [f"host {socket.gethostname()}: rank 2 failed"] * 2
    assert [evidence for _, evidence in told] == [["seen with 2"], ["seen with 0"]]
    together([north, south], lambda node: node.next_rendezvous())
    assert not north.disturbed(), "the failure of the last attempt is over"
    watcher = threading.Thread(target=south.agree_on_cause, args=(Failure(3, 1.0, "rank 3 failed"), 0))
    watcher.start()
    while not north.disturbed():  # though its own workers are well
        pass
    assert "rank 3 failed" in north.agree_on_cause(None, 0)[0].sentence
    watcher.join()


def test_where_workers_hang_there_is_no_cause_but_what_every_host_has_seen(meet):
    nodes = meet(2)
    together(nodes, lambda node: node.next_rendezvous())
    told = together(nodes, lambda node: node.agree_on_cause(None, node.node))
    assert told == [(None, [1]), (None, [0])]


def test_what_is_shared_is_of_this_attempt(meet):
    north, south = meet(2)
    together([north, south], lambda node: node.next_rendezvous())
    north.share("from north")
    until = time.monotonic() + 10
    while south.share("from south") != ["from north"] or north.share("from north") != ["from south"]:
        assert time.monotonic() < until
    together([north, south], lambda node: node.next_rendezvous())
    assert north.share("") == []


def test_a_host_that_falls_silent_is_named_as_the_cause_and_nothing_restarts(meet):
    north, south = meet(2)
    together([north, south], lambda node: node.next_rendezvous())
    south._all.leave(0)  # what a power cut leaves behind: a status that no longer changes
    failure, _ = north.agree_on_cause(Failure(0, 1.0, "connection closed by peer", secondary=True), 0)
    assert failure.fatal
    assert f"host {socket.gethostname()} (node 1) is lost" in str(failure)
    assert "run the same command on every host" in str(failure)
    with pytest.raises(ShoalError, match=r"\(node 1\) is lost"):
        north.next_rendezvous()


def test_hosts_that_were_told_different_plans_refuse(meet):
    answers = meet(2, plans=[2, 3], timeout_s=3.0)
    assert all(isinstance(answer, ShoalError) for answer in answers)
    assert "--nnodes differs: 2 on" in str(answers[0])


def test_two_hosts_with_one_number_are_refused(meet):
    answers = meet(3, nodes=[0, 1, 1], timeout_s=2.0)
    texts = [str(answer) for answer in answers if isinstance(answer, Exception)]
    assert any("another host has this number" in text for text in texts)
    assert any("node 2 did not come within 2 s" in text for text in texts)


def test_a_missing_first_host_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ShoalError, match=f"no node 0 at 127.0.0.1:{port} within 0.5 s"):
        Rendezvous(Endpoint(1, "127.0.0.1", port, 1), 1, timeout_s=0.5)


def test_a_port_in_use_and_an_address_of_another_host_are_refused(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=f"nobody can listen on 127.0.0.1:{port}"):
            Rendezvous(Endpoint(1, "127.0.0.1", port, 0), 1, timeout_s=1)
    with pytest.raises(InputError, match="this host has no address"):
        Rendezvous(Endpoint(2, "192.0.2.200", port, 0), 1, timeout_s=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_across_hosts_is_refused_with_the_reason(host):
    with pytest.raises(InputError, match="loopback address: on any other host it means that host itself"):
        Rendezvous(Endpoint(2, host, 29400, 0), 1, timeout_s=1)


def test_the_interface_is_set_for_gloo_and_across_hosts_for_nccl(monkeypatch):
    for name in network.INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    lo = network.interfaces()["127.0.0.1"]
    assert network.choose_interface("127.0.0.1", across_hosts=False) == lo
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("NCCL_SOCKET_IFNAME")) == (lo, None)
    monkeypatch.setattr(network, "interface_towards", lambda address: "ib0")
    assert network.choose_interface("10.0.0.1", across_hosts=False) == lo, "the user's choice stands"
    with pytest.raises(InputError, match="GLOO_SOCKET_IFNAME = lo, but the ranks are on several hosts"):
        network.choose_interface("10.0.0.1", across_hosts=True)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    network.choose_interface("10.0.0.1", across_hosts=True)
    assert [os.environ[name] for name in network.INTERFACE_VARIABLES] == ["ib0", "=ib0"]
    with pytest.raises(InputError, match="MASTER_ADDR is"):
        network.choose_interface("127.0.1.1", across_hosts=True)


def test_rank_info_knows_whether_other_hosts_take_part():
    env = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_info(env).is_on_several_hosts
    assert not read_rank_info({**env, "LOCAL_WORLD_SIZE": "4"}).is_on_several_hosts


def test_what_differs_between_hosts_is_named_with_the_hosts():
    facts = {
        "north": {"torch": "2.13.0", "dataset 0": "a"},
        "south": {"torch": "2.12.1", "dataset 0": "a"},
        "east": {"torch": "2.13.0"},
    }
    assert network.differing(facts) == [
        "torch differs: 2.13.0 on north, east; 2.12.1 on south",
        "dataset 0 differs: a on north, south; missing on east",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, None, None), "--nnodes 2 needs --rdzv HOST:PORT"),
        ((2, "10.0.0.1", None), "--rdzv 10.0.0.1 is not HOST:PORT"),
        ((2, "10.0.0.1:99999", None), "is not HOST:PORT"),
        ((2, "10.0.0.1:29400", 2), "--node-rank 2 is not among 2 nodes: use 0 to 1"),
        ((1, "10.0.0.1:29400", None), "--rdzv and --node-rank are for several hosts"),
        ((0, None, None), "--nnodes 0: at least 1 is needed"),
    ],
)
def test_half_a_meeting_place_is_refused(arguments, words):
    with pytest.raises(InputError, match=words):
        network.several_hosts(*arguments)


def test_a_meeting_place_is_read():
    assert network.several_hosts(1, None, None) is None
    assert network.several_hosts(2, "node1:29400", None) == network.Endpoint(2, "node1", 29400)
    assert network.several_hosts(4, "[fd00::1]:29400", 3) == network.Endpoint(4, "fd00::1", 29400, 3)


def test_back_ends_are_chosen_or_refused_with_the_reason():
    cpu = Device(torch.device("cpu"), "gloo", "CPU")
    gpu = Device(torch.device("cuda"), "cpu:gloo,cuda:nccl", "GPU")
    assert [choose_backend("auto", device) for device in (cpu, gpu)] == ["gloo", "cpu:gloo,cuda:nccl"]
    assert [choose_backend("gloo", device) for device in (cpu, gpu)] == ["cpu:gloo", "cpu:gloo,cuda:gloo"]
    assert choose_backend("nccl", gpu) == "cpu:gloo,cuda:nccl"
    with pytest.raises(ConfigError, match="nccl, but the ranks compute on CPUs"):
        choose_backend("nccl", cpu)
    if not torch.distributed.is_mpi_available():
        with pytest.raises(ConfigError, match="this torch was built without MPI"):
            choose_backend("mpi", cpu)
