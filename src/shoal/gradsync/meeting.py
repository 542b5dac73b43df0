"""How replicas that are worlds of their own find each other: boards and notes in a store, a group to talk.

Meetings have numbers. An island that comes to one leaves a note, and when all that are expected have, the
first to say so writes the record: who takes part as a member, and who joins, having been elsewhere. All obey
the record. An island whose beat stops is no longer expected. The ranks of an island meet the same ranks of
the others; what they exchange counts if it went well for all of them, else there is another meeting with
those who are left. So nobody waits for the dead, and all get the same.

Keys: board<island>; here<number>.<island>, a note; record<number>; last, the newest record; done<number>, how
many ranks have finished their exchange; verdict<number>.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from shoal.comm.gloo_transport import GlooTransport
from shoal.comm.slow_transport import slowed
from shoal.comm.transport import Traffic, Transport
from shoal.errors import InputError, ShoalError, StoppedError
from shoal.runtime.boards import Boards
from shoal.runtime.islands import BEAT_S, LOST_S, board_keys
from shoal.runtime.log import log
from shoal.runtime.network import address_towards
from shoal.runtime.rendezvous import connect
from shoal.runtime.ring import mark
from shoal.runtime.seat import Island

_POLL_S = 0.01
_FRESH_S = 4 * BEAT_S  # knowledge of the others that is older counts for nothing: this process stood still
_TRANSFER_S = 30.0  # longest wait for 8 MiB of a transfer: 2.3 Mbit/s is enough
_MAX_FAILURES = 5  # exchanges that fail one after the other
T = TypeVar("T")
Work = Callable[["Record", Transport | None], T]  # no transport: nobody else is there


@dataclass(frozen=True)
class Place:
    """How far an island is."""

    rounds: int  # outer steps of any fragment
    step: int
    flight: tuple[int, int] | None = None  # the fragment under way, and the step after which it left
    digest: str = ""  # of what it knows, at the beginning

    def agrees_with(self, other: Place) -> bool:
        """Say whether the next mean of both would be one of like things, moving one anchor."""
        keys = ("rounds", "flight", "digest")
        return all(getattr(self, key) == getattr(other, key) for key in keys)


@dataclass(frozen=True)
class Note:
    """What an island that comes to a meeting leaves there."""

    mark: str  # of its start
    plan: str  # digest of its settings and data
    begun: bool  # it was at the meeting before
    place: Place


@dataclass(frozen=True)
class Record:
    """Who takes part in a meeting: island -> mark of its start; and how far the first member is."""

    number: int
    members: dict[str, str]
    joiners: dict[str, str]
    place: Place

    @property
    def present(self) -> list[int]:
        """All islands of this meeting, the members first."""
        return [int(name) for name in (*self.members, *self.joiners)]

    def has(self, island: Island) -> bool:
        """Say whether this start of an island takes part."""
        name = str(island.replica)
        return island.mark in (self.members.get(name), self.joiners.get(name))


class Meeting:
    """One rank's way to the same ranks of the other islands; rank 0 speaks for its island."""

    def __init__(
        self,
        island: Island,
        rank: int,
        plan: str,
        patience_s: float,
        slow_link: float = 0.0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reach the store. At the beginning all islands are waited for, but no longer than `patience_s`.

        `plan` is what must be the same for all; `stopped` says whether the user asks rank 0 to wait no more.
        """
        self.traffic = Traffic()
        self._slow_link, self._stopped = slow_link, stopped  # Mbit/s
        self._island, self._rank, self._plan = island, rank, plan
        self._patience_s, self._transfer_s = patience_s, _TRANSFER_S
        self._address = address_towards(island.host)  # an island itself may meet on loopback
        self._store: dist.Store = connect(island.host, island.port)
        self._until = time.monotonic() + patience_s
        self._last: Record | None = None  # the meeting that this island comes from
        self._group: tuple[list[int], Transport] | None = None
        self._boards = Boards(
            lambda: connect(island.host, island.port),
            board_keys(island.replicas),
            island.replica,
            {"state": "joining", "mark": island.mark},
            BEAT_S,
        )
        if rank == 0:
            self._boards.start()

    def enter(self, place: Place, take_over: Work[None]) -> Record:
        """Begin with the others, or join those who have begun; return the record of how.

        Where nobody trains, the one that is ahead and those that know the same are the members. Where there
        are joiners, all call `take_over`, by which members tell them what they know. Collective over the
        island.
        """
        past, noted = -1, -1
        while True:
            mark("meeting")  # waiting for others is no hang
            record = self._read("last")
            if record and record.number > past and record.has(self._island):
                if not record.joiners or self._exchange(record, take_over) is not None:
                    self._last = record
                    self._boards.board["state"] = "training"
                    return record
                past = record.number
            elif self._rank == 0:
                self._end_if_stopped()
                self._refuse_if_all_are_done()
                number = record.number + 1 if record else 0
                if number != noted:
                    self._leave_note(number, place)
                noted = number
                self._open(number)
            time.sleep(_POLL_S)

    def agree(self, place: Place, work: Work[T]) -> tuple[Record, T]:
        """Meet, call `work` with the others, and return what it gave, once it went well for all of them.

        Raises a LeftOut if they went on without this island. Collective over those who come.
        """
        for _ in range(_MAX_FAILURES):
            record = self._last = self._come(place)
            if record.present == [self._island.replica]:
                return record, work(record, None)
            if (result := self._exchange(record, work)) is not None:
                return record, result[0]
        raise ShoalError(
            f"{_MAX_FAILURES} exchanges with other replicas failed, one after the other",
            hint="see the logs of all replicas; check the network between them",
        )

    def everybody(self, step: int) -> Transport:
        """Return a way to all islands, in their order, on which one may wait `patience_s` for a tensor.

        None may be missing. Collective over them.
        """
        self._transfer_s = self._patience_s
        place = Place(0, step)
        self.enter(place, lambda record, transport: None)
        record, transport = self.agree(place, lambda record, transport: transport)
        if transport is None or len(record.present) < self._island.replicas:
            raise ShoalError(
                f"of {self._island.replicas} replicas only {', '.join(map(str, record.present))} came",
                hint="see the logs of the others; run the same command again on all hosts",
            )
        return transport

    def leave(self) -> None:
        """Tell the others not to wait any more."""
        self._boards.board["state"] = "done"
        self._boards.leave(LOST_S)

    def _come(self, place: Place) -> Record:
        """Leave a note and return the record of the next meeting."""
        assert self._last is not None, "enter first"
        number = self._last.number + 1
        if self._rank == 0:
            self._leave_note(number, place)
        while (record := self._read(f"record{number}")) is None:
            if self._rank == 0:
                self._open(number)
            time.sleep(_POLL_S)
        if not record.has(self._island):
            raise LeftOut(
                f"the other replicas went on without this one, number {self._island.replica}: it was not "
                f"heard for {LOST_S:g} s, its exchange failed, or it was in another round"
            )
        return record

    def _leave_note(self, number: int, place: Place) -> None:
        note = Note(self._island.mark, self._plan, self._last is not None, place)
        self._store.set(f"here{number}.{self._island.replica}", json.dumps(asdict(note)))

    def _open(self, number: int) -> None:
        """Write the record of a meeting if all who are expected are here.

        One that has begun and is elsewhere is in no record: it has to start again, and joins.
        """
        if not self._may_open(number):
            return
        notes = {
            k: note
            for k in range(self._island.replicas)
            if not self._is_gone(k) and (note := self._note(number, k))
        }
        self._refuse_other_plans(notes)
        begun = {k: note for k, note in notes.items() if note.begun} or notes
        ahead = max((note.place for note in begun.values()), key=lambda place: (place.step, place.rounds))
        members = {k: note.mark for k, note in begun.items() if note.place.agrees_with(ahead)}
        joiners = {k: note.mark for k, note in notes.items() if k not in members and not note.begun}
        place = notes[min(members)].place
        text = json.dumps(asdict(Record(number, _named(members), _named(joiners), place)))
        if self._store.compare_set(f"record{number}", "", text) == text.encode():
            self._store.set("last", text)
            self._clear(number - 2)

    def _may_open(self, number: int) -> bool:
        """Say whether all have come who were at the meeting before; who begins waits for all there are."""
        if self._island.replica not in self._boards.told:
            return False  # no board was read yet
        others = [k for k in range(self._island.replicas) if k != self._island.replica]
        states = {k: self._boards.told[k]["state"] for k in others if k in self._boards.told}
        if self._last is not None:
            expected = [k for k in self._last.present if k in others and self._is_as_in(self._last, k)]
        elif any(state == "training" and not self._is_gone(k) for k, state in states.items()):
            return False  # they will let this island in
        else:
            patient = time.monotonic() < self._until
            if patient and "restarting" in states.values():
                return False  # all were lost at once: one of those may be ahead
            expected = [k for k in others if (patient and number == 0) or k in states]
        return all(self._note(number, k) for k in expected if not self._is_gone(k))

    def _exchange(self, record: Record, work: Work[T]) -> tuple[T] | None:
        """Return what `work` gives; None where it did not go well for all. Collective over the present."""
        result: tuple[T] | None = None
        try:
            result = (work(record, self._connect(record)),)
            self._store.add(f"done{record.number}", 1)
        except RuntimeError as error:  # gloo's and the store's: somebody went
            log.info(f"an exchange with other replicas failed, and is done again: {error}")
            self._store.compare_set(f"verdict{record.number}", "", "failed")
        if self._verdict(record) == b"good":
            assert result is not None, record
            return result
        self._group = None
        return None

    def _connect(self, record: Record) -> Transport:
        """Make a group anew, or return that of the last meeting if the same islands came from there."""
        if self._group is not None and self._group[0] == record.present and not record.joiners:
            return self._group[1]
        self._group = None
        transport = GlooTransport(
            dist.PrefixStore(f"group{record.number}.{self._rank}", self._store),
            record.present.index(self._island.replica),
            len(record.present),
            address=self._address,
            meet_s=LOST_S,
            timeout_s=self._transfer_s,
            traffic=self.traffic,
        )
        self._group = record.present, slowed(transport, self._slow_link)
        return self._group[1]

    def _verdict(self, record: Record) -> bytes:
        """Wait until all ranks have finished, or one cannot; the first to see either says so for all."""
        key, total = f"verdict{record.number}", len(record.present) * self._island.size
        while not self._store.check([key]):
            if self._store.add(f"done{record.number}", 0) == total:
                self._store.compare_set(key, "", "good")
            elif self._rank == 0 and any(self._is_gone(k) for k in record.present):
                self._store.compare_set(key, "", "failed")
            time.sleep(_POLL_S)
        return bytes(self._store.get(key))

    def _end_if_stopped(self) -> None:
        if self._stopped():
            self._boards.board["state"] = "lost"  # not done: others may wait for each other
            self._boards.leave(LOST_S)
            raise StoppedError("stopped before the other replicas came: the last committed checkpoint stands")

    def _refuse_if_all_are_done(self) -> None:
        states = [board["state"] for k, board in self._boards.told.items() if k != self._island.replica]
        if "done" in states and not {"training", "joining"} & set(states):
            raise ShoalError(
                "all other replicas have ended: there is nobody to join",
                hint="run the command of the whole run again to train on",
            )

    def _refuse_other_plans(self, notes: dict[int, Note]) -> None:
        if other := [str(k) for k, note in notes.items() if note.plan != self._plan]:
            raise InputError(
                f"replica(s) {', '.join(other)} and replica {self._island.replica} have other settings, "
                "data, or versions of shoal or torch",
                hint="give every host the same command, installation and data",
            )

    def _is_gone(self, replica: int) -> bool:
        """Say whether an island has ended, or was silent for too long, as far as this process can know."""
        if replica == self._island.replica or replica not in self._boards.told:
            return False
        fresh = time.monotonic() - self._boards.reached < _FRESH_S
        silent = fresh and self._boards.silent_s(replica) > LOST_S
        return silent or self._boards.told[replica]["state"] in ("lost", "restarting", "done")

    def _is_as_in(self, record: Record, replica: int) -> bool:
        """Say whether an island was not started again since a meeting."""
        seen = self._boards.told.get(replica, {}).get("mark")
        name = str(replica)
        return seen in (None, record.members.get(name), record.joiners.get(name))

    def _note(self, number: int, replica: int) -> Note | None:
        """Return the note of an island, unless it was started again since."""
        values = self._value(f"here{number}.{replica}")
        if not values or self._boards.told.get(replica, {}).get("mark", values["mark"]) != values["mark"]:
            return None
        return Note(**{**values, "place": _place(values["place"])})

    def _read(self, key: str) -> Record | None:
        values = self._value(key)
        return Record(**{**values, "place": _place(values["place"])}) if values else None

    def _value(self, key: str) -> dict[str, Any] | None:
        return dict(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _clear(self, number: int) -> None:
        """Remove what nobody reads any more; records stay, for those who come too late."""
        for k in range(self._island.replicas):
            self._store.delete_key(f"here{number}.{k}")
        for kind in ("done", "verdict"):
            self._store.delete_key(f"{kind}{number}")


class LeftOut(RuntimeError):
    """The others did not wait; this island has to start again to join them, as its launcher has it do."""


def _named(marks: dict[int, str]) -> dict[str, str]:
    return {str(replica): mark for replica, mark in marks.items()}


def _place(values: dict[str, Any]) -> Place:
    flight = values["flight"]
    return Place(**{**values, "flight": tuple(flight) if flight else None})
