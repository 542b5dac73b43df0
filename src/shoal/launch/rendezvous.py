"""Where the launchers of a job meet: a store that node 0 hosts, with a status of each node.

A node's status says that it is there, which attempt it is ready for, how its workers failed, whether it has
left. A host whose status no longer changes is lost.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shoal.errors import InputError, ShoalError, counted
from shoal.launch.membership import Membership
from shoal.runtime import network
from shoal.runtime.failure import Failure
from shoal.runtime.log import log
from shoal.runtime.network import Endpoint

LOST_S = 15.0  # silence after which a host counts as lost
_BEAT_S = 0.25
_STORE_S = 60.0
_LEAVE_S = 5.0  # how long node 0 keeps the store for nodes that have not read everything yet
RUN_AGAIN = "when it is back, run the same command on every host: training resumes from the last checkpoint"


def open_store(endpoint: Endpoint, address: str, timeout_s: float) -> dist.TCPStore:
    """Host or reach the store of an endpoint, whose numeric address is known."""
    return _host(endpoint, address) if endpoint.is_host(address) else _reach(endpoint, address, timeout_s)


def connect(address: str, port: int) -> dist.TCPStore:
    """Return a connection of one's own to a store that is there."""
    return dist.TCPStore(address, port, None, False, timedelta(seconds=_STORE_S))


def _host(endpoint: Endpoint, address: str) -> dist.TCPStore:
    """Listen on the one given address; left to itself the store would listen on every interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, endpoint.port), family=family)
    except OSError as error:
        where = f"{address}:{endpoint.port}"
        if not network.is_own(address):
            raise InputError(
                f"node 0 must run on the host of --rdzv, but this host has no address {address}",
                hint="give another --node-rank here, or another --rdzv",
            ) from error
        raise InputError(
            f"nobody can listen on {where}: {error.strerror}",
            hint="choose another port, or give each host its own --node-rank",
        ) from error
    port = listener.getsockname()[1]
    wait = timedelta(seconds=_STORE_S)
    descriptor = listener.detach()
    return dist.TCPStore(address, port, None, True, wait, wait_for_workers=False, master_listen_fd=descriptor)


def _reach(endpoint: Endpoint, address: str, timeout_s: float) -> dist.TCPStore:
    """Connect to node 0's store, which may not be there yet."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, endpoint.port), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise ShoalError(
                    f"no node 0 at {endpoint.host}:{endpoint.port} within {timeout_s:g} s: {error}",
                    hint="start the same command there, and look for a firewall in between "
                    "(`shoal doctor --rdzv` on both hosts)",
                ) from error
            time.sleep(_BEAT_S)
    return connect(address, endpoint.port)


class Rendezvous(RendezvousHandler):
    """The rendezvous of all launchers, for torch's agent and for our own. Every attempt has a new one."""

    def __init__(self, endpoint: Endpoint, nproc: int, timeout_s: float) -> None:
        """Host or reach the store, and wait until all nodes are there."""
        self.nnodes, self._timeout_s = endpoint.nnodes, timeout_s
        self._address = network.resolve(endpoint.host, endpoint.port)
        if endpoint.nnodes > 1:
            network.refuse_loopback(self._address, f"--rdzv {endpoint.host}:{endpoint.port}")
        hosting = endpoint.is_host(self._address)
        self._store = open_store(endpoint, self._address, timeout_s)
        self._port = self._store.port
        self.node = 0 if hosting else self._take_number(endpoint)
        self._attempt = -1
        self._run_id = uuid.uuid4().hex
        self._own: dict[str, Any] = {
            "host": socket.gethostname(),
            "nproc": nproc,
            "nnodes": endpoint.nnodes,
            "ready": -1,
        }
        keys = [f"status{node}" for node in range(endpoint.nnodes)]
        self._all = Membership(
            lambda: connect(self._address, self._port), keys, self.node, self._own, _BEAT_S
        )
        self._statuses = self._all.told
        if endpoint.nnodes > 1:
            self._all.start()
            log.info(
                f"waiting for {counted(endpoint.nnodes - 1, 'other host')} at {self._address}:{self._port}"
            )
            try:
                self._wait("to the first rendezvous", lambda status: True)
                self._refuse_other_plan()
            except BaseException:
                self.shutdown()
                raise

    @property
    def world_size(self) -> int:
        """The ranks of all hosts together."""
        return sum(self._status(node)["nproc"] for node in range(self.nnodes))

    def describe(self) -> str:
        """Say who meets, for the first line on the screen."""
        first = sum(self._status(node)["nproc"] for node in range(self.node))
        last = first + self._own["nproc"] - 1
        return (
            f"{self.nnodes} hosts meet at {self._address}:{self._port}: {', '.join(self.hosts)}; "
            f"this is node {self.node}, ranks {first} to {last}"
            + ("" if self.node == 0 else "; rank 0 tells how it goes, on node 0")
        )

    @property
    def hosts(self) -> list[str]:
        """The name of each node's host."""
        return [str(self._status(node)["host"]) for node in range(self.nnodes)]

    @property
    def own_host(self) -> str:
        """The name of this host; empty where there is no other."""
        return str(self._own["host"]) if self.nnodes > 1 else ""

    @property
    def address(self) -> str:
        """The numeric address at which the hosts meet."""
        return self._address

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Tell the other nodes a JSON value, and return every node's."""
        self._own[what] = value
        self._wait(what, lambda status: what in status)
        return [self._status(node)[what] for node in range(self.nnodes)]

    def disturbed(self) -> bool:
        """Say whether the workers here must end because of another host."""
        return bool(self._lost()) or any(self._failure_of(node) for node in self._others())

    def share(self, value: Any) -> list[Any]:
        """Give the other nodes a JSON value, instead of the last one; return theirs of the same attempt."""
        self._own["shared"] = {"attempt": self._attempt, "value": value}
        shared = [self._statuses.get(node, {}).get("shared", {}) for node in self._others()]
        return [told["value"] for told in shared if told.get("attempt") == self._attempt]

    def agree_on_cause(self, own: Failure | None, evidence: Any) -> tuple[Failure | None, list[Any]]:
        """Tell the others how this attempt failed here, and hear them.

        Return the first cause of all, None where the workers hang, and the other nodes' evidence.
        """
        if self.nnodes == 1:
            return own, []
        if own is not None:
            own = Failure(**{**asdict(own), "sentence": f"host {self._own['host']}: {own.sentence}"})
        failure = {"attempt": self._attempt, "cause": own and asdict(own), "evidence": evidence}
        self._own["failure"] = failure
        until = time.monotonic() + 2 * LOST_S
        while (
            time.monotonic() < until and not self._lost() and not all(map(self._failure_of, self._others()))
        ):
            time.sleep(_BEAT_S / 2)
        others = [told for node in self._others() if (told := self._failure_of(node))]
        causes = [own] if own else []
        causes += [Failure(**told["cause"]) for told in others if told["cause"]]
        causes += [
            Failure(-1, 0.0, f"{self._lost_sentence(node)}\n  hint: {RUN_AGAIN}", fatal=True)
            for node in self._lost()[:1]
        ]
        first = min(causes, key=lambda cause: (cause.secondary, cause.time), default=None)
        return first, [told["evidence"] for told in others]

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet for the next attempt, with a store prefix of its own. Called by the agent."""
        self._attempt += 1
        self._own["ready"] = self._attempt
        if self.nnodes > 1:
            self._wait(f"to attempt {self._attempt}", lambda status: status["ready"] >= self._attempt)
        store = dist.PrefixStore(f"agent{self._attempt}", self._store)
        return RendezvousInfo(store, self.node, self.nnodes, RendezvousStoreInfo(self._address, self._port))

    def finish(self) -> None:
        """Wait until the workers of all hosts are done: node 0 must keep the store until then."""
        self._own["done"] = True
        if self.nnodes > 1:
            while not all(self._status(node).get("done") for node in self._others()) and not self.disturbed():
                time.sleep(_BEAT_S)

    def shutdown(self) -> bool:
        """Leave; node 0, which hosts the store, as the last one. The thread must not outlive the program."""
        self._own["left"] = True
        until = time.monotonic() + _LEAVE_S
        while self.node == 0 and time.monotonic() < until:
            lost = {0, *self._lost()}
            if all(status.get("left") for node, status in self._statuses.items() if node not in lost):
                break
            time.sleep(_BEAT_S)
        self._all.leave(_LEAVE_S)
        return True

    use_agent_store = True

    def get_backend(self) -> str:
        return "shoal"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def _take_number(self, endpoint: Endpoint) -> int:
        node = endpoint.node if endpoint.node is not None else int(self._store.add("nodes", 1))
        if node >= endpoint.nnodes or int(self._store.add(f"node{node}", 1)) > 1:
            raise InputError(
                f"node {node} of {endpoint.nnodes} is one too many: "
                + ("the numbers begin at 0" if node >= endpoint.nnodes else "another host has this number"),
                hint=f"give each of the {endpoint.nnodes} hosts its own --node-rank, or none of them",
            )
        return node

    def _refuse_other_plan(self) -> None:
        if len({self._status(node)["nnodes"] for node in range(self.nnodes)}) > 1:
            told = [
                f"{self._status(node)['nnodes']} on {self._status(node)['host']}"
                for node in range(self.nnodes)
            ]
            raise InputError(f"--nnodes differs: {', '.join(told)}", hint="give every host the same command")

    def _wait(self, what: str, ready: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until every other node has a status that is `ready`; raise where one is gone."""
        until = time.monotonic() + self._timeout_s
        while missing := [
            n for n in self._others() if n not in self._statuses or not ready(self._statuses[n])
        ]:
            if lost := self._lost():
                raise ShoalError(self._lost_sentence(lost[0]), hint=RUN_AGAIN)
            for node in missing:
                if self._statuses.get(node, {}).get("left"):
                    raise ShoalError(
                        f"{self._name(node)} has left the job", hint="its own screen says why; " + RUN_AGAIN
                    )
            if time.monotonic() > until:
                named = ", ".join(self._name(node) for node in missing)
                raise ShoalError(
                    f"{named} did not come within {self._timeout_s:g} s ({what})",
                    hint=f"run the same command on all {self.nnodes} hosts; --runtime.timeout_s waits longer",
                )
            time.sleep(_BEAT_S / 2)

    def _lost(self) -> list[int]:
        """Return the nodes of which nothing is heard any more; without the store there is node 0 to name."""
        if self.node != 0 and (time.monotonic() - self._all.reached > LOST_S or not self._all.alive):
            return [0]
        return [
            node
            for node in self._others()
            if node in self._statuses
            and not self._statuses[node].get("left")
            and self._all.silent_s(node) > LOST_S
        ]

    def _lost_sentence(self, node: int) -> str:
        return f"{self._name(node)} is lost: nothing is heard from its launcher any more"

    def _name(self, node: int) -> str:
        return (
            f"host {self._statuses[node]['host']} (node {node})" if node in self._statuses else f"node {node}"
        )

    def _others(self) -> list[int]:
        return [node for node in range(self.nnodes) if node != self.node]

    def _status(self, node: int) -> dict[str, Any]:
        return self._own if node == self.node else self._statuses[node]

    def _failure_of(self, node: int) -> dict[str, Any] | None:
        told: dict[str, Any] | None = self._statuses.get(node, {}).get("failure")
        return told if told and told["attempt"] == self._attempt else None
