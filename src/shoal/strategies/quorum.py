"""Quorums: the replica groups that take part in one exchange, formed anew for each exchange (as in torchft).

Quorums are numbered. Each replica group announces itself for the next quorum in the launcher's store. When
all expected replica groups have done so, one of them writes the quorum: members, and joiners, which were not
in the quorum before. A replica group whose heartbeat stops is no longer expected. Each rank exchanges with
the same rank of the other replica groups. The exchange counts if it succeeded on all ranks. Otherwise the
remaining replica groups form another quorum. So no rank waits for a dead one, and all ranks get the same
result.

Keys of the store: status<replica>, its heartbeat; here<number>.<replica>, its announcement; record<number>,
the quorum; last, the newest quorum; done<number>, the number of ranks that have finished their exchange;
verdict<number>, its outcome.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from shoal.comm.gloo_transport import GlooTransport
from shoal.comm.slow_transport import slowed
from shoal.comm.transport import Transport
from shoal.config.load import to_toml
from shoal.config.sections import Runtime
from shoal.errors import InputError, ShoalError, StoppedError
from shoal.gradsync.exchange import Traffic
from shoal.gradsync.replicas import Replica
from shoal.launch.membership import Membership
from shoal.launch.rendezvous import connect
from shoal.runtime.flight_recorder import mark
from shoal.runtime.log import log
from shoal.runtime.network import address_towards
from shoal.runtime.rank_info import ReplicaGroupInfo
from shoal.strategies.replica_groups import BEAT_S, LOST_S, status_keys

_POLL_S = 0.01
_FRESH_S = 4 * BEAT_S  # older status is ignored: this process itself was suspended
_TRANSFER_S = 30.0  # longest wait for 8 MiB of a transfer: 2.3 Mbit/s is enough
_MAX_FAILURES = 5  # consecutive failed exchanges
T = TypeVar("T")
Work = Callable[["Quorum", Transport | None], T]  # transport is None if no other replica takes part


@dataclass(frozen=True)
class Progress:
    """Progress of a replica group."""

    rounds: int  # outer steps of any fragment
    step: int
    flight: tuple[int, int] | None = None  # the in-flight fragment, and the step where it began
    digest: str = ""  # of its common state, at the start

    def agrees_with(self, other: Progress) -> bool:
        """Return whether both would exchange the same fragment for the same anchor."""
        keys = ("rounds", "flight", "digest")
        return all(getattr(self, key) == getattr(other, key) for key in keys)


@dataclass(frozen=True)
class QuorumMember:
    """Announcement of a replica group."""

    mark: str  # identifies its start
    plan: str  # digest of its settings and data
    begun: bool  # it was in the previous quorum
    progress: Progress


@dataclass(frozen=True)
class Quorum:
    """Participants (replica -> mark of its start), and the progress of the first member."""

    number: int
    members: dict[str, str]
    joiners: dict[str, str]
    progress: Progress

    @property
    def present(self) -> list[int]:
        """All replica groups of this quorum, members first."""
        return [int(name) for name in (*self.members, *self.joiners)]

    def has(self, group: ReplicaGroupInfo) -> bool:
        """Return whether this start of a replica group takes part."""
        name = str(group.replica)
        return group.mark in (self.members.get(name), self.joiners.get(name))


class QuorumClient:
    """Client that forms quorums for one rank. Rank 0 announces the replica group."""

    def __init__(
        self,
        group: ReplicaGroupInfo,
        rank: int,
        plan: str,
        patience_s: float,
        slow_link: float = 0.0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to the store. The first quorum waits for all replica groups, for at most `patience_s`.

        `plan` is a digest that must be the same for all. `stopped` returns whether rank 0 was asked to stop.
        """
        self.traffic = Traffic()
        self._slow_link, self._stopped = slow_link, stopped  # Mbit/s
        self._own, self._rank, self._plan = group, rank, plan
        self._patience_s, self._transfer_s = patience_s, _TRANSFER_S
        self._address = address_towards(group.host)  # the store itself may be on loopback
        self._store: dist.Store = connect(group.host, group.port)
        self._until = time.monotonic() + patience_s
        self._last: Quorum | None = None  # the last quorum that this replica was in
        self._transport: tuple[list[int], Transport] | None = None
        self._membership = Membership(
            lambda: connect(group.host, group.port),
            status_keys(group.num_replicas),
            group.replica,
            {"state": "joining", "mark": group.mark},
            BEAT_S,
        )
        if rank == 0:
            self._membership.start()

    def enter(self, progress: Progress, take_over: Work[None]) -> Quorum:
        """Start with the others, or join them if they have started; return the quorum.

        If no replica group trains yet, the one that is furthest ahead and those with the same common state
        become members. If there are joiners, all call `take_over`, in which members send the common state.
        Collective over the replica.
        """
        past, announced = -1, -1
        while True:
            mark("quorum")  # waiting for others is not a hang
            quorum = self._read("last")
            if quorum and quorum.number > past and quorum.has(self._own):
                if not quorum.joiners or self._exchange(quorum, take_over) is not None:
                    self._last = quorum
                    self._membership.status["state"] = "training"
                    return quorum
                past = quorum.number
            elif self._rank == 0:
                self._end_if_stopped()
                self._refuse_if_all_are_done()
                number = quorum.number + 1 if quorum else 0
                if number != announced:
                    self._announce(number, progress)
                announced = number
                self._form(number)
            time.sleep(_POLL_S)

    def agree(self, progress: Progress, work: Work[T]) -> tuple[Quorum, T]:
        """Form a quorum and call `work`; return its result, once it has succeeded on all ranks of the quorum.

        Raises NotInQuorum if the others continued without this replica. Collective over the quorum.
        """
        for _ in range(_MAX_FAILURES):
            quorum = self._last = self._await_quorum(progress)
            if quorum.present == [self._own.replica]:
                return quorum, work(quorum, None)
            if (result := self._exchange(quorum, work)) is not None:
                return quorum, result[0]
        raise ShoalError(
            f"{_MAX_FAILURES} exchanges with other replicas failed, one after the other",
            hint="see the logs of all replicas; check the network between them",
        )

    def everybody(self, step: int) -> Transport:
        """Return a transport to all replicas in order, with a time limit of `patience_s` for a tensor.

        All replicas must be present. Collective over them.
        """
        self._transfer_s = self._patience_s
        progress = Progress(0, step)
        self.enter(progress, lambda quorum, transport: None)
        quorum, transport = self.agree(progress, lambda quorum, transport: transport)
        if transport is None or len(quorum.present) < self._own.num_replicas:
            raise ShoalError(
                f"of {self._own.num_replicas} replicas only {', '.join(map(str, quorum.present))} came",
                hint="see the logs of the others; run the same command again on all hosts",
            )
        return transport

    def leave(self) -> None:
        """Announce that this replica takes part no more."""
        self._membership.status["state"] = "done"
        self._membership.leave(LOST_S)

    def _await_quorum(self, progress: Progress) -> Quorum:
        """Announce this replica and return the next quorum."""
        assert self._last is not None, "enter first"
        number = self._last.number + 1
        if self._rank == 0:
            self._announce(number, progress)
        while (quorum := self._read(f"record{number}")) is None:
            if self._rank == 0:
                self._form(number)
            time.sleep(_POLL_S)
        if not quorum.has(self._own):
            raise NotInQuorum(
                f"the other replicas went on without this one, number {self._own.replica}: it was not "
                f"heard for {LOST_S:g} s, its exchange failed, or it was in another round"
            )
        return quorum

    def _announce(self, number: int, progress: Progress) -> None:
        member = QuorumMember(self._own.mark, self._plan, self._last is not None, progress)
        self._store.set(f"here{number}.{self._own.replica}", json.dumps(asdict(member)))

    def _form(self, number: int) -> None:
        """Write the quorum if all expected replica groups have announced themselves.

        One that has begun but has another state is left out. It has to start again, and then joins.
        """
        if not self._may_form(number):
            return
        candidates = {
            k: member
            for k in range(self._own.num_replicas)
            if not self._is_gone(k) and (member := self._announced(number, k))
        }
        self._refuse_other_plans(candidates)
        begun = {k: member for k, member in candidates.items() if member.begun} or candidates
        ahead = max(
            (member.progress for member in begun.values()),
            key=lambda progress: (progress.step, progress.rounds),
        )
        members = {k: member.mark for k, member in begun.items() if member.progress.agrees_with(ahead)}
        joiners = {
            k: member.mark for k, member in candidates.items() if k not in members and not member.begun
        }
        progress = candidates[min(members)].progress
        text = json.dumps(asdict(Quorum(number, _named(members), _named(joiners), progress)))
        if self._store.compare_set(f"record{number}", "", text) == text.encode():
            self._store.set("last", text)
            self._clear(number - 2)

    def _may_form(self, number: int) -> bool:
        """Return whether all of the previous quorum are here; at the start, whether all replicas are."""
        if self._own.replica not in self._membership.told:
            return False  # no heartbeat was read yet
        others = [k for k in range(self._own.num_replicas) if k != self._own.replica]
        states = {k: self._membership.told[k]["state"] for k in others if k in self._membership.told}
        if self._last is not None:
            expected = [k for k in self._last.present if k in others and self._is_same_start(self._last, k)]
        elif any(state == "training" and not self._is_gone(k) for k, state in states.items()):
            return False  # the others will let this replica join
        else:
            patient = time.monotonic() < self._until
            if patient and "restarting" in states.values():
                return False  # all were lost at once: an absent one may be ahead
            expected = [k for k in others if (patient and number == 0) or k in states]
        return all(self._announced(number, k) for k in expected if not self._is_gone(k))

    def _exchange(self, quorum: Quorum, work: Work[T]) -> tuple[T] | None:
        """Return the result of `work`, or None if it failed on any rank. Collective over those present."""
        result: tuple[T] | None = None
        try:
            result = (work(quorum, self._connect(quorum)),)
            self._store.add(f"done{quorum.number}", 1)
        except RuntimeError as error:  # raised by gloo and the store: a peer is gone
            log.info(f"an exchange with other replicas failed, and is done again: {error}")
            self._store.compare_set(f"verdict{quorum.number}", "", "failed")
        if self._verdict(quorum) == b"good":
            assert result is not None, quorum
            return result
        self._transport = None
        return None

    def _connect(self, quorum: Quorum) -> Transport:
        """Connect the replicas of a quorum, or return the last connection if the replicas are the same."""
        if self._transport is not None and self._transport[0] == quorum.present and not quorum.joiners:
            return self._transport[1]
        self._transport = None
        transport = GlooTransport(
            dist.PrefixStore(f"group{quorum.number}.{self._rank}", self._store),
            quorum.present.index(self._own.replica),
            len(quorum.present),
            address=self._address,
            meet_s=LOST_S,
            timeout_s=self._transfer_s,
            traffic=self.traffic,
        )
        self._transport = quorum.present, slowed(transport, self._slow_link)
        return self._transport[1]

    def _verdict(self, quorum: Quorum) -> bytes:
        """Wait until all ranks have finished or one cannot; the first rank to see it records it for all."""
        key, total = f"verdict{quorum.number}", len(quorum.present) * self._own.size
        while not self._store.check([key]):
            if self._store.add(f"done{quorum.number}", 0) == total:
                self._store.compare_set(key, "", "good")
            elif self._rank == 0 and any(self._is_gone(k) for k in quorum.present):
                self._store.compare_set(key, "", "failed")
            time.sleep(_POLL_S)
        return bytes(self._store.get(key))

    def _end_if_stopped(self) -> None:
        if self._stopped():
            self._membership.status["state"] = "lost"  # not done: others may wait for each other
            self._membership.leave(LOST_S)
            raise StoppedError("stopped before the other replicas came: the last committed checkpoint stands")

    def _refuse_if_all_are_done(self) -> None:
        states = [status["state"] for k, status in self._membership.told.items() if k != self._own.replica]
        if "done" in states and not {"training", "joining"} & set(states):
            raise ShoalError(
                "all other replicas have ended: there is nobody to join",
                hint="run the command of the whole run again to train on",
            )

    def _refuse_other_plans(self, candidates: dict[int, QuorumMember]) -> None:
        if other := [str(k) for k, member in candidates.items() if member.plan != self._plan]:
            raise InputError(
                f"replicas {', '.join(other)} and {self._own.replica} have other settings, "
                "data, or versions of shoal or torch",
                hint="give every host the same command, installation and data",
            )

    def _is_gone(self, replica: int) -> bool:
        """Return whether a replica has ended or was silent for too long, as far as this process can tell."""
        if replica == self._own.replica or replica not in self._membership.told:
            return False
        fresh = time.monotonic() - self._membership.reached < _FRESH_S
        silent = fresh and self._membership.silent_s(replica) > LOST_S
        return silent or self._membership.told[replica]["state"] in ("lost", "restarting", "done")

    def _is_same_start(self, quorum: Quorum, replica: int) -> bool:
        """Return whether a replica was not restarted since a quorum."""
        seen = self._membership.told.get(replica, {}).get("mark")
        name = str(replica)
        return seen in (None, quorum.members.get(name), quorum.joiners.get(name))

    def _announced(self, number: int, replica: int) -> QuorumMember | None:
        """Return the announcement of a replica, unless it was restarted since."""
        values = self._value(f"here{number}.{replica}")
        if not values or self._membership.told.get(replica, {}).get("mark", values["mark"]) != values["mark"]:
            return None
        return QuorumMember(**{**values, "progress": _progress(values["progress"])})

    def _read(self, key: str) -> Quorum | None:
        values = self._value(key)
        return Quorum(**{**values, "progress": _progress(values["progress"])}) if values else None

    def _value(self, key: str) -> dict[str, Any] | None:
        return dict(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _clear(self, number: int) -> None:
        """Remove keys that are no longer read; quorums stay, for replicas that arrive late."""
        for k in range(self._own.num_replicas):
            self._store.delete_key(f"here{number}.{k}")
        for kind in ("done", "verdict"):
            self._store.delete_key(f"{kind}{number}")


def reach(replica: Replica) -> QuorumClient | None:
    """Return the client of a replica; None if there is only one replica.

    All replicas must have the same settings, data and versions.
    """
    config, group = replica.config, replica.group
    if group is None:
        assert replica.num_replicas == 1, replica.num_replicas  # `shoal train` refuses others
        return None
    same = {"runtime": Runtime(), "data": config.data.model_copy(update={"datasets": ()})}
    facts = [to_toml(config.model_copy(update=same)), *replica.fingerprints]
    facts += [importlib.metadata.version(name) for name in ("shoal", "torch")]
    plan = xxhash.xxh3_128_hexdigest("\n".join(facts).encode())
    runtime = config.runtime
    return QuorumClient(group, replica.rank, plan, runtime.timeout_s, runtime.slow_link, replica.stopped)


class NotInQuorum(RuntimeError):
    """The others continued without this replica, which has to be restarted by its launcher to join."""


def _named(marks: dict[int, str]) -> dict[str, str]:
    return {str(replica): mark for replica, mark in marks.items()}


def _progress(values: dict[str, Any]) -> Progress:
    flight = values["flight"]
    return Progress(**{**values, "flight": tuple(flight) if flight else None})
