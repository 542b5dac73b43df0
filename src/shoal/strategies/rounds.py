"""Replica groups that exchange outer gradients every `sync.every` steps; `strategies.outer` has the formulas.

Outer gradients are exchanged by fragment, and whole gradients during the warm-up. Each exchange runs in a
thread, whether the replica waits for it or trains meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from shoal.comm.transport import Transport
from shoal.config.sections import Sync
from shoal.gradsync.replicas import Replica, SynchronousReplicas, Update
from shoal.runtime.files import append_json
from shoal.runtime.flight_recorder import mark
from shoal.runtime.log import log
from shoal.runtime.mesh import local, local_gradient
from shoal.strategies.codecs import Codec, Int8, Plain
from shoal.strategies.outer import average, due, fragments_of, mix, outer_sgd, pack, round_weight, unpack
from shoal.strategies.quorum import Progress, Quorum, QuorumClient, reach

_PROGRESS_S = 1.0  # a waiting rank marks progress this often: waiting for a slow replica is not a hang
_MAX_FRAGMENTS = 10_000  # a checkpoint of Shoal never has more
_WHOLE = -1  # in place of the number of a fragment: all weights


@dataclass
class InFlightFragment:
    """Fragment whose exchange has begun; during warm-up, the gradient of a step."""

    fragment: int
    since: int  # the step after which the exchange began
    mean: Future[Tensor]  # the mean of outer gradients, or of gradients

    def wait(self) -> Tensor:
        """Wait for the mean and return it."""
        while True:
            try:
                return self.mean.result(_PROGRESS_S)
            except TimeoutError:
                if self.mean.done():  # just now, or the exchange itself timed out
                    return self.mean.result()
                mark("quorum")


def make(replica: Replica) -> OuterRounds:
    """Return the rounds of a replica; they connect to the other replicas in `start`."""
    config = replica.config
    return OuterRounds(
        replica.weights,
        config.sync,
        steps=config.train.steps,
        rate_at=replica.rate_at,
        inner=replica.update,
        num_replicas=replica.num_replicas,
        quorum=reach(replica),
        record=replica.record,
        incidents=replica.incidents,
        decoder=config.model.network == "decoder",
    )


class OuterRounds(SynchronousReplicas):
    """Outer optimiser of one rank: starts and finishes exchanges, and moves anchor and weights."""

    kinds = ("anchor", "momentum", "incoming")

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        sync: Sync,
        *,
        steps: int,
        rate_at: Callable[[int], float],
        inner: Update,
        num_replicas: int,
        quorum: QuorumClient | None,
        record: Callable[..., None],
        incidents: Path | None,
        decoder: bool = True,
    ) -> None:
        """Build from this rank's weights; `quorum` is None if there is one replica.

        `rate_at` returns the inner learning rate of a step as a fraction of its peak. `record` is called with
        a step and the figures of an exchange. `incidents` is None on all ranks except one.
        """
        streaming = sync.strategy == "streaming_diloco"
        self._overlap = sync.overlap if streaming else 0
        self._fragments_of = partial(fragments_of, weights, decoder=decoder)
        self._fragments = self._fragments_of(sync.fragments if streaming else 1)
        self._sgd = outer_sgd(sync, num_replicas)
        self._exact = Plain(next(iter(weights.values())).dtype)
        self._codec = Int8(sync.block) if sync.int8 else self._exact
        self._weights, self._steps = weights, steps
        self._every, self._warmup_steps = sync.every, sync.warmup_steps
        self._rate_at = rate_at if sync.momentum_follows_lr else None
        self._inner = inner
        self._done, self._rate = 0, math.nan  # last step; this step's learning rate, nan: skipped
        self._num_replicas, self._quorum = num_replicas, quorum
        self.traffic = quorum.traffic if quorum else None
        self._record, self._incidents = record, incidents
        self._anchors: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}
        self._incoming: dict[str, Tensor] = {}
        self._taken = torch.empty(0)  # the common state that a member sent to this rank as a joiner
        self._rounds = 0
        self._in_flight: InFlightFragment | None = None
        self._present = set(range(num_replicas))
        self._facts = {"replicas": 1, "sent_bytes": 0}  # of the last exchange

    @torch.no_grad()
    def start(self, step: int) -> int:
        """Join the other replicas; return the step to continue from, theirs if they are ahead."""
        if not self._anchors:
            self._anchors = {name: weight.detach().clone() for name, weight in self._weights.items()}
        if not self._sgd.momentum:
            self._momenta = {}
        elif not self._momenta:
            self._momenta = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()}
        if step < self._warmup_steps:  # a longer warm-up than before may begin in the middle of a round
            self._take_anchors()
        if self._in_flight is not None:
            incoming = [local(tensor) for tensor in self._incoming.values()]
            self._in_flight.mean.set_result(pack(incoming, self._codec))
        self._done = step
        if self._quorum is None:
            return step
        flight = (self._in_flight.fragment, self._in_flight.since) if self._in_flight else None
        progress = Progress(self._rounds, step, flight, self._digest(step))
        quorum = self._quorum.enter(progress, self._take_over)
        if len(self._taken):
            self._present = set(quorum.present)
            self._facts = {"replicas": len(quorum.members), "sent_bytes": 0}
            self._done = self._join(quorum.progress)
            return self._done
        self._notice(quorum, step)
        return step

    def take_step(self, step: Callable[[float], None], rate: float) -> None:
        """Take an inner step. During warm-up, `after_step` takes it with the mean of all gradients."""
        if self._done < self._warmup_steps:
            self._rate = rate
        else:
            step(rate)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Finish and start the exchanges that are due; after the last step all weights are equal."""
        self._done = step
        if self._in_flight and self._is_due_to_finish(self._in_flight.since, step):
            self._finish(step)
        self._exchange(step, self._due(step))

    def close(self) -> None:
        if self._quorum is not None:
            self._quorum.leave()

    def state(self) -> dict[str, Any]:
        flight = self._in_flight and [self._in_flight.fragment, self._in_flight.since]
        return {
            "rounds": self._rounds,
            "momentum": bool(self._momenta),
            "fragments": len(self._fragments),
            "flight": flight,
            "facts": dict(self._facts),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the anchor and momentum of each parameter, and the mean of the in-flight fragment."""
        return self._named(self._arriving())

    def expect(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return tensors to fill. An in-flight fragment continues if the number of fragments is the same."""
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
            names = self._fragments_of(count)[fragment]
            self._facts |= {key: int(state["facts"][key]) for key in self._facts if "facts" in state}
            self._incoming = {name: torch.empty_like(blank[name]) for name in names}
            if count == len(self._fragments):
                self._in_flight = InFlightFragment(fragment, since, Future())
        return self._named(self._incoming)

    def _named(self, incoming: dict[str, Tensor]) -> dict[str, Tensor]:
        found = zip(self.kinds, (self._anchors, self._momenta, incoming), strict=True)
        return {f"{kind}.{name}": tensor for kind, named in found for name, tensor in named.items()}

    def _due(self, step: int) -> list[int]:
        """Return the fragments whose exchange starts after a step, in order."""
        if step <= self._warmup_steps:
            return [_WHOLE]
        return due(step, self._every, len(self._fragments), all_now=step == self._steps)

    def _like(self, fragment: int) -> list[Tensor]:
        """Return tensors of the shapes that are exchanged for a fragment; in warm-up two numbers first."""
        if fragment == _WHOLE:
            anchors = list(map(local, self._anchors.values()))
            return [anchors[0].new_empty(2), *anchors]
        return [local(self._anchors[name]) for name in self._fragments[fragment]]

    def _codec_of(self, fragment: int) -> Codec:
        return self._exact if fragment == _WHOLE else self._codec

    def _is_due_to_finish(self, since: int, step: int) -> bool:
        """Say whether an exchange that began after step `since` is finished after this one."""
        return step >= since + self._overlap or step <= self._warmup_steps or step == self._steps

    def _exchange(self, step: int, fragments: list[int]) -> None:
        for fragment in fragments:
            self._start(fragment, step)
            if self._is_due_to_finish(step, step):
                self._finish(step)

    def _start(self, fragment: int, step: int) -> None:
        """Start to exchange the outer gradient of a fragment, or in warm-up the gradient of a step."""
        if fragment == _WHOLE:
            moved = self._contribution()
        else:
            names = self._fragments[fragment]
            moved = [local(self._anchors[name]) - local(self._weights[name]) for name in names]
        codec, progress = self._codec_of(fragment), Progress(self._rounds, step, (fragment, step))
        flat = pack(moved, codec)
        self._in_flight = InFlightFragment(
            fragment, step, in_thread(lambda: self._mean(flat, codec, progress))
        )

    def _contribution(self) -> list[Tensor]:
        """Return weight 1, the learning rate and gradients; zeros if this replica skips the step."""
        gradients = self._gradients()
        contribution = [gradients[0].new_tensor([1.0, self._rate]), *gradients]
        if math.isnan(self._rate):
            torch._foreach_zero_(contribution)
        self._rate = math.nan
        return contribution

    def _gradients(self) -> list[Tensor]:
        for weight in self._weights.values():
            if weight.grad is None:  # of one that joins
                weight.grad = torch.zeros_like(weight)
        return [local_gradient(weight) for weight in self._weights.values()]

    def _mean(self, flat: Tensor, codec: Codec, progress: Progress) -> Tensor:
        """Return the mean over the quorum. Runs in a thread. Collective over the replicas."""
        if self._quorum is None:
            return flat
        sent = self._quorum.traffic.num_bytes
        quorum, mean = self._quorum.agree(progress, lambda *there: self._with_others(flat, codec, *there))
        self._notice(quorum, progress.step)
        sent = self._quorum.traffic.num_bytes - sent
        self._facts = {"replicas": len(quorum.members), "sent_bytes": sent}
        return mean

    def _with_others(self, flat: Tensor, codec: Codec, quorum: Quorum, transport: Transport | None) -> Tensor:
        if transport is None:
            return flat
        if transport.rank < len(quorum.members):
            flat = average(transport.group(range(len(quorum.members))), flat, codec)
        self._tell(quorum, transport, flat)
        return flat

    def _tell(self, quorum: Quorum, transport: Transport, incoming: Tensor) -> None:
        """Have the first member send the common state to joiners."""
        for joiner in range(len(quorum.members), transport.size) if transport.rank == 0 else ():
            transport.send(torch.cat([*_on_host(self._known(quorum.progress.step)), incoming]), joiner)

    def _take_over(self, quorum: Quorum, transport: Transport | None) -> None:
        """Send or receive the common state at the start."""
        assert transport is not None, quorum
        if transport.rank < len(quorum.members):
            self._tell(quorum, transport, self._in_flight.wait() if self._in_flight else torch.empty(0))
            return
        taken = [*_on_host(self._known(quorum.progress.step))]
        if quorum.progress.flight:
            fragment, _ = quorum.progress.flight
            taken.append(pack(self._like(fragment), self._codec_of(fragment)))
        self._taken = torch.cat(taken)
        transport.recv(self._taken, 0)

    def _join(self, progress: Progress) -> int:
        """Take over the others' anchor and momentum, and the anchor as weights."""
        known = self._known(progress.step)
        parts = self._taken.split(
            [*(t.numel() for t in known), len(self._taken) - sum(t.numel() for t in known)]
        )
        for tensor, part in zip(known, parts, strict=False):
            tensor.copy_(part.view_as(tensor))
        self._take_anchors()
        self._taken, self._rounds = torch.empty(0), progress.rounds
        log.info(f"joined the other replicas at step {progress.step}: weights and momentum are theirs")
        if progress.flight:
            fragment, since = progress.flight
            mean: Future[Tensor] = Future()
            mean.set_result(parts[-1])
            self._in_flight = InFlightFragment(fragment, since, mean)
            if self._is_due_to_finish(since, progress.step):
                self._finish(progress.step)
            self._exchange(progress.step, [later for later in self._due(progress.step) if later > fragment])
        return progress.step

    def _finish(self, step: int) -> None:
        """Wait for the mean of the in-flight fragment and take the outer step."""
        assert self._in_flight is not None, step
        flight = self._in_flight
        mean = unpack(flight.wait(), self._like(flight.fragment), self._codec_of(flight.fragment))
        if flight.fragment == _WHOLE:
            self._step_together(*mean)
        else:
            self._outer_step(flight, step, mean)
        self._rounds += 1
        self._in_flight = None
        self._record(step, round=self._rounds, **self._facts)

    def _step_together(self, weight_and_rate: Tensor, *gradients: Tensor) -> None:
        """Take the warm-up step of the replicas that do not skip it."""
        share, rate = weight_and_rate.tolist()
        if share:
            torch._foreach_copy_(self._gradients(), gradients)
            torch._foreach_div_(self._gradients(), share)
            self._inner.step(rate / share)
        for name, weight in self._weights.items():
            local(self._anchors[name]).copy_(local(weight))

    def _outer_step(self, flight: InFlightFragment, step: int, gradients: list[Tensor]) -> None:
        """Take the outer step of a fragment and mix its anchor into the weights."""
        moved = self._weight(flight)
        for name, gradient in zip(self._fragments[flight.fragment], gradients, strict=True):
            anchor = local(self._anchors[name])
            momentum = local(self._momenta[name]) if self._sgd.momentum else None
            self._sgd.step(anchor, momentum, gradient, moved)
            mix(local(self._weights[name]), anchor, step - flight.since)

    def _weight(self, flight: InFlightFragment) -> float:
        if self._rate_at is None:
            return 1.0
        offset = flight.fragment * self._every // len(self._fragments)
        return round_weight(self._rate_at, flight.since, self._every, offset, self._warmup_steps)

    def _take_anchors(self) -> None:
        for name, weight in self._weights.items():
            local(weight).copy_(local(self._anchors[name]))
        self._in_flight = None

    def _known(self, step: int) -> list[Tensor]:
        """Return the common state after a step: anchors, momenta; in warm-up the inner moments, too."""
        moments = self._inner.state() if step <= self._warmup_steps else {}
        return [local(t) for named in (self._anchors, self._momenta, moments) for t in named.values()]

    def _digest(self, step: int) -> str:
        """Return the digest of the common state."""
        digest = xxhash.xxh3_128()
        for tensor in _on_host([*self._known(step), *([self._in_flight.wait()] if self._in_flight else [])]):
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _arriving(self) -> dict[str, Tensor]:
        """Wait for the mean outer gradient of the in-flight fragment; return it by parameter."""
        if self._in_flight is None:
            return {}
        names = self._fragments[self._in_flight.fragment]
        arriving = {name: torch.empty_like(self._anchors[name]) for name in names}
        into = [local(tensor) for tensor in arriving.values()]
        for tensor, part in zip(into, unpack(self._in_flight.wait(), into, self._codec), strict=True):
            tensor.copy_(part)
        return arriving

    def _notice(self, quorum: Quorum, step: int) -> None:
        """Report replicas that are lost or joined."""
        present = set(quorum.present)
        for replica in sorted(self._present - present):
            self._report(step, f"replica {replica} is lost: {len(present)} of {self._num_replicas} go on")
        for name in quorum.joiners:
            self._report(step, f"replica {name} joins: {len(present)} of {self._num_replicas} go on")
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
