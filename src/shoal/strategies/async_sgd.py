"""Asynchronous SGD with bounded staleness: a worker waits for others only if it is too far ahead.

Each rank is a worker, and the server of a share of the weights, as in Ho and others, "More effective
distributed ML via a stale synchronous parallel parameter server" (2013), and CNTK's DataParallelASGD.

A worker's gradient is that of the mean loss over its own samples, clipped by its own norm. For each gradient
that arrives, a server takes one optimiser step of its share, at 1/n of the learning rate for n workers. The n
gradients of a step therefore weigh as much as one gradient of all their samples, and weight decay is the
same. Momentum and moments are updated n times a step.

A server answers a gradient of step t with its newest weights, once it has the gradients of step t - staleness
from all workers. A worker begins step t + 1, with the newest weights that have arrived, when all servers have
reported that they have these gradients. So no worker is more than `staleness` steps ahead, and each gradient
is answered once. If t is saved or is the last step, the bound is 0: the saved state has all gradients of
steps up to t, and no others.

For weights of S bytes, of which rank r serves S(r), rank r of n sends S - S(r) bytes of gradients and
(n - 1) S(r) bytes of weights in a step: 2 (n - 1) / n S if shares are even. A message is a header of five
numbers, followed by the values that it announces.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shoal.comm.transport import Transport
from shoal.errors import ShoalError
from shoal.gradsync.replicas import Replica, SynchronousReplicas, Update
from shoal.runtime.flight_recorder import mark
from shoal.strategies.owners import share_out
from shoal.strategies.quorum import reach

_PROGRESS_S = 1.0  # a waiting worker marks progress this often: waiting for a slow one is not a hang
_GRADIENT, _WEIGHTS, _BYE = 0, 1, 2


@dataclass
class StalenessBound:
    """Limit on how far ahead a worker may be, and the step after which all workers stop."""

    staleness: int
    save_every: int  # steps; 0: at the end only
    last: int
    stop_after: int = 0  # the last step of this start, if it is not done yet

    def begin(self, step: int) -> None:
        """Continue after a step."""
        if step < self.stop_after:
            self.last = min(self.last, self.stop_after)

    def is_common(self, step: int) -> bool:
        """Return whether all workers wait for each other after a step."""
        return step == self.last or (bool(self.save_every) and step % self.save_every == 0)

    def needed(self, step: int) -> int:
        """Return the step whose gradients a server needs before a worker may pass this one."""
        return step if self.is_common(step) else step - self.staleness


class Others(Protocol):
    """Connection of a worker to all others."""

    def everybody(self, step: int) -> Transport: ...

    def leave(self) -> None: ...


class Message(NamedTuple):
    """Header that is sent ahead of `numel` values."""

    kind: int
    step: int
    number: int  # with a gradient: the last step of the run; with weights: the step complete on the server
    rate: float  # with a gradient: the learning rate; nan: the step was skipped
    numel: int


class Server:
    """Newest weights of a share, with their optimiser state. Not thread-safe."""

    def __init__(
        self,
        share: dict[str, nn.Parameter],
        update_of: Callable[[dict[str, nn.Parameter]], Update],
        workers: int,
        bound: StalenessBound,
    ) -> None:
        self._share, self._bound = list(share.values()), bound
        named = {name: nn.Parameter(weight.detach().clone()) for name, weight in share.items()}
        self._weights = list(named.values())
        self._update = update_of(named)
        self._done = [0] * workers
        self._unanswered: list[tuple[int, int]] = []  # worker, step

    def state(self) -> list[Tensor]:
        """Return the optimiser's state, in the order in which it is sent."""
        return [tensor for _, tensor in sorted(self._update.state().items())]

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Copy the worker's weights, which are those after a step."""
        for own, weight in zip(self._weights, self._share, strict=True):
            own.copy_(weight)
        self._done = [step] * len(self._done)

    @torch.no_grad()
    def take(self, worker: int, step: int, rate: float, gradient: Tensor) -> list[tuple[int, int, Tensor]]:
        """Take a step with a worker's gradient; return answers now due: (worker, complete step, values).

        After a step at which all workers wait for each other, the answer to worker 0, which saves, also has
        the optimiser state.
        """
        if not math.isnan(rate):
            gradients = [torch.empty_like(weight) for weight in self._weights]
            fill(gradients, gradient)
            for weight, own in zip(self._weights, gradients, strict=True):
                weight.grad = own
            self._update.step(rate / len(self._done))
        self._done[worker] = step
        self._unanswered.append((worker, step))
        complete = min(self._done)
        due = [one for one in self._unanswered if self._bound.needed(one[1]) <= complete]
        self._unanswered = [one for one in self._unanswered if one not in due]
        return [(to, complete, self._answer(saves=to == 0 and self._bound.is_common(t))) for to, t in due]

    def _answer(self, *, saves: bool) -> Tensor:
        return pack([*self._weights, *(self.state() if saves else ())], self._share)


def make(replica: Replica) -> AsyncSgd:
    """Return the worker and server of a replica; they connect to the others in `start`."""
    config = replica.config
    steps, every = config.train.steps, config.checkpoint.every
    return AsyncSgd(
        replica.weights,
        replica.update.state,
        replica.update_of,
        StalenessBound(config.sync.staleness, every, steps, config.runtime.stop_after),
        replica.group.replica if replica.group else 0,
        replica.num_replicas,
        reach(replica),
    )


class AsyncSgd(SynchronousReplicas):
    """One rank's worker and server."""

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        whole: Callable[[], dict[str, Tensor]],
        update_of: Callable[[dict[str, nn.Parameter]], Update],
        bound: StalenessBound,
        rank: int,
        workers: int,
        others: Others | None,
    ) -> None:
        """Build from the worker's weights.

        `whole` returns the optimiser state of all weights, as in a checkpoint. `others` is None with
        one worker.
        """
        self.saves = rank == 0
        self._rank, self._bound, self._others = rank, bound, others
        self._shares = share_out(weights, workers)
        self._like = list(weights.values())
        self._whole = whole
        self._server = Server(self._shares[rank], update_of, workers, bound)
        self._peers = [peer for peer in range(workers) if peer != rank]
        self._known = [0] * workers  # server -> the last step whose gradients it has from all workers
        self._news: dict[int, Tensor] = {}  # server -> its newest weights, not yet taken
        self._rate = math.nan
        self._asked = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()  # guards the server and all state that threads change
        self._sending = threading.Lock()
        self._boxes: dict[int, SimpleQueue[tuple[Message, Tensor] | None]] = {}
        self._threads: list[threading.Thread] = []

    @torch.no_grad()
    def start(self, step: int) -> int:
        """Send worker 0's weights to all workers, and its optimiser state to the servers."""
        weights = [weight for share in self._shares for weight in share.values()]
        if self._others is not None:
            self._transport = self._others.everybody(step)
            self.traffic = self._transport.traffic
        if self._rank == 0:
            for peer in self._peers:
                values = pack([*weights, *self._moments(peer)], self._like)
                self._post(peer, Message(_WEIGHTS, step, step, 0.0, values.numel()), values)
            fill(self._server.state(), pack(self._moments(0), self._like))
        else:
            message, values = self._receive(0)
            step = message.step
            fill([*weights, *self._server.state()], values)
        self._server.begin(step)
        self._bound.begin(step)
        self._known = [step] * len(self._known)
        for peer in self._peers:
            self._boxes[peer] = SimpleQueue()
            self._threads += [self._thread(self._deliver, peer), self._thread(self._listen, peer)]
        return step

    def take_step(self, step: Callable[[float], None], rate: float) -> None:
        self._rate = rate

    def after_step(self, step: int) -> None:
        """Send each server its gradient, wait if too far ahead, and take the newest weights that arrived."""
        # No worker begins a step more than `staleness` later before it has an answer for this one.
        last = step + self._bound.staleness + 1 if self._asked else self._bound.last
        for server, share in enumerate(self._shares):
            gradients = (
                [] if math.isnan(self._rate) else [w.grad for w in share.values() if w.grad is not None]
            )
            gradient = pack(gradients, self._like)
            message = Message(_GRADIENT, step, last, self._rate, gradient.numel())
            if server == self._rank:
                self._serve(self._rank, message, gradient)
            else:
                self._boxes[server].put((message, gradient))
        self._rate = math.nan
        with self._changed:
            while self._failure is None and min(self._known) < self._bound.needed(step):
                mark("quorum")
                self._changed.wait(_PROGRESS_S)
            if self._failure is not None:
                raise self._failure
            news, self._news = self._news, {}
            self.figures = {"staleness": step - min(self._known)}
        self._read(news)

    def stopping(self, step: int, *, asked: bool) -> bool:
        """Agree with the others on a last step, which no worker has begun yet."""
        self._asked |= asked and step < self._bound.last
        return step >= self._bound.last

    def close(self) -> None:
        """Wait until all other workers close too, as they may need what this rank has sent; then leave."""
        for box in self._boxes.values():
            box.put((Message(_BYE, 0, 0, 0.0, 0), torch.empty(0)))
            box.put(None)
        for thread in self._threads:
            thread.join()
        if self._others is not None:
            self._others.leave()

    @torch.no_grad()
    def _read(self, news: dict[int, Tensor]) -> None:
        for server, values in news.items():
            weights = list(self._shares[server].values())
            more = values.numel() > sum(weight.numel() for weight in weights)
            fill([*weights, *(self._moments(server) if more else ())], values)

    def _moments(self, server: int) -> list[Tensor]:
        """Return a share's optimiser state as a checkpoint has it, in the order in which it is sent."""
        share = self._shares[server]
        return [tensor for key, tensor in sorted(self._whole().items()) if key.rpartition(".")[0] in share]

    def _serve(self, worker: int, message: Message, gradient: Tensor) -> None:
        with self._changed:
            self._bound.last = min(self._bound.last, message.number)
            for to, complete, values in self._server.take(worker, message.step, message.rate, gradient):
                answer = Message(_WEIGHTS, message.step, complete, 0.0, values.numel())
                if to == self._rank:
                    self._hear(to, answer, values)
                else:
                    self._boxes[to].put((answer, values))

    def _hear(self, server: int, message: Message, values: Tensor) -> None:
        with self._changed:
            self._known[server], self._news[server] = message.number, values
            self._changed.notify_all()

    def _listen(self, peer: int) -> None:
        while True:
            message, values = self._receive(peer)
            if message.kind == _BYE:
                return
            (self._serve if message.kind == _GRADIENT else self._hear)(peer, message, values)

    def _deliver(self, peer: int) -> None:
        for message, values in iter(self._boxes[peer].get, None):
            self._post(peer, message, values)

    def _post(self, peer: int, message: Message, values: Tensor) -> None:
        head = torch.tensor(message, dtype=torch.float64)
        try:
            with self._sending:  # one thread at a time counts
                handles = [self._transport.isend(tensor, peer) for tensor in (head, values)]
            for handle in handles:
                handle.wait()
        except (RuntimeError, TimeoutError) as error:
            raise _lost(peer, error) from error

    def _receive(self, peer: int) -> tuple[Message, Tensor]:
        head = torch.empty(len(Message._fields), dtype=torch.float64)
        try:
            self._transport.recv(head, peer)
            kind, step, number, rate, numel = head.tolist()
            values = torch.empty(int(numel), dtype=self._like[0].dtype)
            self._transport.recv(values, peer)
        except (RuntimeError, TimeoutError) as error:
            raise _lost(peer, error) from error
        return Message(int(kind), int(step), int(number), rate, int(numel)), values

    def _thread(self, work: Callable[[int], None], peer: int) -> threading.Thread:
        """Start a thread for one other rank; its exception is raised by the next `after_step`."""

        def run() -> None:
            try:
                work(peer)
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def pack(tensors: Iterable[Tensor], like: Sequence[Tensor]) -> Tensor:
    """Return tensors as one flat tensor in host memory, in the format of `like`; always a copy."""
    dtype = like[0].dtype if like else torch.float32
    return torch.cat([torch.empty(0, dtype=dtype), *(t.detach().flatten().to("cpu", dtype) for t in tensors)])


def fill(tensors: Sequence[Tensor], values: Tensor) -> None:
    """Copy values made by `pack` into tensors."""
    parts = values.split([tensor.numel() for tensor in tensors]) if tensors else ()
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _lost(peer: int, error: Exception) -> ShoalError:
    return ShoalError(
        f"worker {peer} is lost, and with it the newest weights of its share: {error}",
        hint="run the same command again: all go on from the first worker's newest checkpoint",
    )
