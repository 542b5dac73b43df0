"""Replicas that train apart and agree on weights now and then; see gradsync.outer for how.

What travels is the outer gradient, fragment by fragment; in warm-up the gradient, whole. Each exchange runs
in a thread, whether the replica waits for it at once or trains on meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from shoal.comm.transport import Transport
from shoal.config.sections import Sync
from shoal.gradsync.after_backward import local_gradient
from shoal.gradsync.after_step import InStep, Update
from shoal.gradsync.codecs import Codec, Int8, Plain
from shoal.gradsync.meeting import Meeting, Place, Record
from shoal.gradsync.outer import average, due, fragments_of, mix, outer_sgd, pack, travel, unpack
from shoal.parallel.tensor import local
from shoal.runtime.files import append_json
from shoal.runtime.log import log
from shoal.runtime.ring import mark

_PROGRESS_S = 1.0  # how often a rank that waits says so: waiting for a slow replica is no hang
_MAX_FRAGMENTS = 10_000  # more are no checkpoint's of ours
_WHOLE = -1  # for the number of a fragment: all weights
KINDS = ("anchor", "momentum", "incoming")  # of tensors in a checkpoint


@dataclass
class Flight:
    """A fragment whose exchange is under way, or in warm-up the gradient of a step."""

    fragment: int
    since: int  # the step after which it left
    mean: Future[Tensor]  # of the outer gradients, or of gradients

    def wait(self) -> Tensor:
        """Return the mean when it is there."""
        while True:
            try:
                return self.mean.result(_PROGRESS_S)
            except TimeoutError:
                if self.mean.done():  # just now, or the exchange itself timed out
                    return self.mean.result()
                mark("meeting")


class OuterRounds(InStep):
    """One rank's part of a replica, which is a world of its own where there are others."""

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        sync: Sync,
        *,
        steps: int,
        rate_at: Callable[[int], float],
        inner: Update,
        replicas: int,
        meeting: Meeting | None,
        record: Callable[..., None],
        incidents: Path | None,
    ) -> None:
        """Take this rank's weights; `meeting` is None where there is one replica.

        `rate_at` gives the inner learning rate of a step as a share of its peak. `record` takes a step and
        facts about an exchange; `incidents` is None on all ranks but one.
        """
        streaming = sync.strategy == "streaming_diloco"
        self._overlap = sync.overlap if streaming else 0
        self._fragments = fragments_of(weights, sync.fragments if streaming else 1)
        self._sgd = outer_sgd(sync, replicas)
        self._exact = Plain(next(iter(weights.values())).dtype)
        self._codec = Int8(sync.block) if sync.int8 else self._exact
        self._weights, self._steps = weights, steps
        self._every, self._warmup_steps = sync.every, sync.warmup_steps
        self._rate_at = rate_at if sync.momentum_follows_lr else None
        self._inner = inner
        self._done, self._rate = 0, math.nan  # the last step; the rate of this one, nan if it is left out
        self._replicas, self._meeting = replicas, meeting
        self.traffic = meeting.traffic if meeting else None
        self._record, self._incidents = record, incidents
        self._anchors: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}
        self._incoming: dict[str, Tensor] = {}
        self._taken = torch.empty(0)  # what a member told this rank as a joiner
        self._rounds = 0
        self._flight: Flight | None = None
        self._present = set(range(replicas))
        self._facts = {"replicas": 1, "sent_bytes": 0}  # of the last exchange

    @torch.no_grad()
    def start(self, step: int) -> int:
        """Meet the other replicas; return the step to go on from, which is theirs if they are ahead."""
        if not self._anchors:
            self._anchors = {name: weight.detach().clone() for name, weight in self._weights.items()}
        if not self._sgd.momentum:
            self._momenta = {}
        elif not self._momenta:
            self._momenta = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()}
        if step < self._warmup_steps:  # a longer one than before may find a round half done
            self._take_anchors()
        if self._flight is not None:
            incoming = [local(tensor) for tensor in self._incoming.values()]
            self._flight.mean.set_result(pack(incoming, self._codec))
        self._done = step
        if self._meeting is None:
            return step
        flight = (self._flight.fragment, self._flight.since) if self._flight else None
        place = Place(self._rounds, step, flight, self._digest(step))
        record = self._meeting.enter(place, self._take_over)
        if len(self._taken):
            self._present = set(record.present)
            self._facts = {"replicas": len(record.members), "sent_bytes": 0}
            self._done = self._join(record.place)
            return self._done
        self._notice(record, step)
        return step

    def take_step(self, step: Callable[[float], None], rate: float) -> None:
        """Take a step; in warm-up `after_step` does, when the mean of all gradients is here."""
        if self._done < self._warmup_steps:
            self._rate = rate
        else:
            step(rate)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """End the exchange that is due, and begin what is due; at the last step all replicas agree."""
        self._done = step
        if self._flight and self._lands(self._flight.since, step):
            self._land(step)
        self._exchange(step, self._due(step))

    def close(self) -> None:
        if self._meeting is not None:
            self._meeting.leave()

    def state(self) -> dict[str, Any]:
        flight = self._flight and [self._flight.fragment, self._flight.since]
        return {
            "rounds": self._rounds,
            "momentum": bool(self._momenta),
            "fragments": len(self._fragments),
            "flight": flight,
            "facts": dict(self._facts),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return anchor and momentum of each parameter, and the mean that a fragment under way will get."""
        found = [self._anchors, self._momenta, self._arriving()]
        return {
            f"{kind}.{name}": t for kind, named in zip(KINDS, found, strict=True) for name, t in named.items()
        }

    def expect(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Prepare for the tensors of a checkpoint; a fragment under way counts if fragments are the same."""
        if "rounds" not in state:  # of a strategy that has no anchor
            return {}
        blank = {name: torch.empty_like(weight.detach()) for name, weight in self._weights.items()}
        self._anchors, self._rounds = blank, int(state["rounds"])
        if state["momentum"]:
            self._momenta = {name: torch.empty_like(anchor) for name, anchor in blank.items()}
        if state["flight"]:
            fragment, since = map(int, state["flight"])
            count = int(state["fragments"])
            if not 0 <= fragment < count <= _MAX_FRAGMENTS:
                raise ValueError(f"fragment {fragment} of {count}")
            names = fragments_of(self._weights, count)[fragment]
            self._facts |= {key: int(state["facts"][key]) for key in self._facts if "facts" in state}
            self._incoming = {name: torch.empty_like(blank[name]) for name in names}
            if count == len(self._fragments):
                self._flight = Flight(fragment, since, Future())
        found = [self._anchors, self._momenta, self._incoming]
        return {
            f"{kind}.{name}": t for kind, named in zip(KINDS, found, strict=True) for name, t in named.items()
        }

    def _due(self, step: int) -> list[int]:
        """Return what is exchanged after a step, in its order."""
        if step <= self._warmup_steps:
            return [_WHOLE]
        return due(step, self._every, len(self._fragments), all_now=step == self._steps)

    def _like(self, fragment: int) -> list[Tensor]:
        """Return tensors of the shapes that travel for a fragment; for a step two numbers come first."""
        if fragment == _WHOLE:
            anchors = list(map(local, self._anchors.values()))
            return [anchors[0].new_empty(2), *anchors]
        return [local(self._anchors[name]) for name in self._fragments[fragment]]

    def _codec_of(self, fragment: int) -> Codec:
        return self._exact if fragment == _WHOLE else self._codec

    def _lands(self, since: int, step: int) -> bool:
        """Say whether what left after step `since` is waited for after this one."""
        return step >= since + self._overlap or step <= self._warmup_steps or step == self._steps

    def _exchange(self, step: int, fragments: list[int]) -> None:
        for fragment in fragments:
            self._take_off(fragment, step)
            if self._lands(step, step):
                self._land(step)

    def _take_off(self, fragment: int, step: int) -> None:
        """Begin to exchange how far this replica has moved from the anchor, or the gradient of a step."""
        if fragment == _WHOLE:
            moved = self._wish()
        else:
            names = self._fragments[fragment]
            moved = [local(self._anchors[name]) - local(self._weights[name]) for name in names]
        codec, place = self._codec_of(fragment), Place(self._rounds, step, (fragment, step))
        flat = pack(moved, codec)
        self._flight = Flight(fragment, step, in_thread(lambda: self._mean(flat, codec, place)))

    def _wish(self) -> list[Tensor]:
        """Return 1 and the learning rate, and gradients; zeros where this replica leaves the step out."""
        gradients = self._gradients()
        wish = [gradients[0].new_tensor([1.0, self._rate]), *gradients]
        if math.isnan(self._rate):
            torch._foreach_zero_(wish)
        self._rate = math.nan
        return wish

    def _gradients(self) -> list[Tensor]:
        for weight in self._weights.values():
            if weight.grad is None:  # of one that joins
                weight.grad = torch.zeros_like(weight)
        return [local_gradient(weight) for weight in self._weights.values()]

    def _mean(self, flat: Tensor, codec: Codec, place: Place) -> Tensor:
        """Return the mean over the replicas that come. Runs in a thread. Collective over the replicas."""
        if self._meeting is None:
            return flat
        sent = self._meeting.traffic.num_bytes
        record, mean = self._meeting.agree(place, lambda *there: self._with_others(flat, codec, *there))
        self._notice(record, place.step)
        sent = self._meeting.traffic.num_bytes - sent
        self._facts = {"replicas": len(record.members), "sent_bytes": sent}
        return mean

    def _with_others(self, flat: Tensor, codec: Codec, record: Record, transport: Transport | None) -> Tensor:
        if transport is None:
            return flat
        if transport.rank < len(record.members):
            flat = average(transport.group(range(len(record.members))), flat, codec)
        self._tell(record, transport, flat)
        return flat

    def _tell(self, record: Record, transport: Transport, incoming: Tensor) -> None:
        """Have the first member send all it knows to those who join."""
        for joiner in range(len(record.members), transport.size) if transport.rank == 0 else ():
            transport.send(torch.cat([*_on_host(self._known(record.place.step)), incoming]), joiner)

    def _take_over(self, record: Record, transport: Transport | None) -> None:
        """Exchange at the beginning, or as one who joins."""
        assert transport is not None, record
        if transport.rank < len(record.members):
            self._tell(record, transport, self._flight.wait() if self._flight else torch.empty(0))
            return
        taken = [*_on_host(self._known(record.place.step))]
        if record.place.flight:
            fragment, _ = record.place.flight
            taken.append(pack(self._like(fragment), self._codec_of(fragment)))
        self._taken = torch.cat(taken)
        transport.recv(self._taken, 0)

    def _join(self, place: Place) -> int:
        """Become what the others are: their anchor and momentum, the anchor as weights."""
        known = self._known(place.step)
        parts = self._taken.split(
            [*(t.numel() for t in known), len(self._taken) - sum(t.numel() for t in known)]
        )
        for tensor, part in zip(known, parts, strict=False):
            tensor.copy_(part.view_as(tensor))
        self._take_anchors()
        self._taken, self._rounds = torch.empty(0), place.rounds
        log.info(f"joined the other replicas at step {place.step}: weights and momentum are theirs")
        if place.flight:
            fragment, since = place.flight
            mean: Future[Tensor] = Future()
            mean.set_result(parts[-1])
            self._flight = Flight(fragment, since, mean)
            if self._lands(since, place.step):
                self._land(place.step)
            self._exchange(place.step, [later for later in self._due(place.step) if later > fragment])
        return place.step

    def _land(self, step: int) -> None:
        """Take the step for which the mean under way was meant."""
        assert self._flight is not None, step
        flight = self._flight
        mean = unpack(flight.wait(), self._like(flight.fragment), self._codec_of(flight.fragment))
        if flight.fragment == _WHOLE:
            self._step_together(*mean)
        else:
            self._outer_step(flight, step, mean)
        self._rounds += 1
        self._flight = None
        self._record(step, round=self._rounds, **self._facts)

    def _step_together(self, wishes: Tensor, *gradients: Tensor) -> None:
        """Take the step of those replicas that wish for one, if any does."""
        share, rate = wishes.tolist()
        if share:
            torch._foreach_copy_(self._gradients(), gradients)
            torch._foreach_div_(self._gradients(), share)
            self._inner.step(rate / share)
        for name, weight in self._weights.items():
            local(self._anchors[name]).copy_(local(weight))

    def _outer_step(self, flight: Flight, step: int, gradients: list[Tensor]) -> None:
        """Move the anchor of a fragment, and take the outcome into the weights."""
        moved = self._travel(flight)
        for name, gradient in zip(self._fragments[flight.fragment], gradients, strict=True):
            anchor = local(self._anchors[name])
            momentum = local(self._momenta[name]) if self._sgd.momentum else None
            self._sgd.step(anchor, momentum, gradient, moved)
            mix(local(self._weights[name]), anchor, step - flight.since)

    def _travel(self, flight: Flight) -> float:
        if self._rate_at is None:
            return 1.0
        offset = flight.fragment * self._every // len(self._fragments)
        return travel(self._rate_at, flight.since, self._every, offset, self._warmup_steps)

    def _take_anchors(self) -> None:
        for name, weight in self._weights.items():
            local(weight).copy_(local(self._anchors[name]))
        self._flight = None

    def _known(self, step: int) -> list[Tensor]:
        """Return all that is the same on all replicas after a step: in warm-up the inner moments, too."""
        moments = self._inner.state() if step <= self._warmup_steps else {}
        return [local(t) for named in (self._anchors, self._momenta, moments) for t in named.values()]

    def _digest(self, step: int) -> str:
        """Return the digest of all this rank would tell one who joins."""
        digest = xxhash.xxh3_128()
        for tensor in _on_host([*self._known(step), *([self._flight.wait()] if self._flight else [])]):
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _arriving(self) -> dict[str, Tensor]:
        """Return the mean outer gradient of the fragment under way, by parameter, when it is there."""
        if self._flight is None:
            return {}
        names = self._fragments[self._flight.fragment]
        arriving = {name: torch.empty_like(self._anchors[name]) for name in names}
        into = [local(tensor) for tensor in arriving.values()]
        for tensor, part in zip(into, unpack(self._flight.wait(), into, self._codec), strict=True):
            tensor.copy_(part)
        return arriving

    def _notice(self, record: Record, step: int) -> None:
        """Say who is lost and who is back."""
        present = set(record.present)
        for replica in sorted(self._present - present):
            self._report(step, f"replica {replica} is lost: {len(present)} of {self._replicas} go on")
        for name in record.joiners:
            self._report(step, f"replica {name} joins: {len(present)} of {self._replicas} go on")
        self._present = present

    def _report(self, step: int, sentence: str) -> None:
        log.warning(f"step {step}: {sentence}")
        if self._incidents is not None:
            append_json(self._incidents, {"step": step, "kind": sentence, "action": "go"})


def _on_host(tensors: list[Tensor]) -> Iterator[Tensor]:
    return (tensor.flatten().cpu() for tensor in tensors)


def in_thread(work: Callable[[], Tensor]) -> Future[Tensor]:
    """Call `work` in a thread that does not keep the process alive."""
    future: Future[Tensor] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
