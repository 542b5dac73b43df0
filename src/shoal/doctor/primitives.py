"""Which operations between ranks work here: each on each back end and device, by two real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.doctor.machine import Finding, find_mpirun, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.comm.transport import Transport
    from shoal.gradsync.exchange import Handle

RANKS = 2
_NUMEL = 1 << 18  # 1 MB of fp32

OPERATIONS = (
    "send_recv",
    "isend_irecv",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
Outcome = dict[str, Any]  # status: works, wrong or unsupported; ms; why


def try_all(num_gpus: int | None = None) -> dict[str, dict[str, Outcome]]:
    """Return the outcome of each operation, by back end and device."""
    import torch

    num_gpus = torch.cuda.device_count() if num_gpus is None else num_gpus
    places = [("gloo", "cpu")]
    if num_gpus:
        places.append(("gloo", "cuda"))
    if num_gpus >= RANKS:  # NCCL wants a GPU for each rank
        places.append(("nccl", "cuda"))
    if find_mpirun():
        places.append(("mpi", "cpu"))
    return {f"{backend} {device}": try_on(backend, device) for backend, device in places}


def try_on(backend: str, device: str, command: list[str] | None = None) -> dict[str, Outcome]:
    """Return the outcome of each operation on one back end, up to one that ends a rank."""
    work = f"import shoal.doctor.primitives as p; p.try_as_rank({backend!r}, {device!r})"
    words, started = command or [sys.executable, "-c", work], RANKS
    if backend == "mpi":
        words, started = [find_mpirun(), "-n", str(RANKS), *words], 1
    try:
        answers = run_ranks(words, started)
    except subprocess.TimeoutExpired:
        return {"start": {"status": "wrong", "why": "the ranks hung"}}
    told: list[list[Outcome]] = [[] for _ in range(RANKS)]
    for _, out, _ in answers:
        for line in map(json.loads, (line for line in out.splitlines() if line.startswith("{"))):
            told[line.pop("rank")].append(line)
    outcomes = {}
    for both in zip(*told, strict=False):
        worst = max(both, key=lambda outcome: ("works", "unsupported", "wrong").index(outcome["status"]))
        outcomes[worst.pop("operation")] = worst
    if failed := [errors for status, _, errors in answers if status]:
        last = (failed[0].strip().splitlines() or ["it died without a word"])[-1]
        outcomes["end"] = {"status": "wrong", "why": last}
    return outcomes


def judge(matrix: dict[str, dict[str, Outcome]]) -> Finding:
    """Say in a line what does not work; a wrong result is a problem, but over MPI, a choice, a warning."""
    by_status: dict[str, list[str]] = {"unsupported": [], "wrong": []}
    faults = []
    for place, outcomes in matrix.items():
        for operation, outcome in outcomes.items():
            if outcome["status"] in by_status:
                by_status[outcome["status"]].append(f"{operation} on {place}")
            if outcome["status"] == "wrong" and "why" in outcome:
                faults.append(outcome["why"])
    tried = sum(len(outcomes) for outcomes in matrix.values())
    fact = f"{tried - sum(map(len, by_status.values()))} of {tried} work"
    for status, names in by_status.items():
        fact += f"; {status}: {', '.join(names)}" if names else ""
    fact += f" ({'; '.join(faults)})" if faults else ""
    if by_status["wrong"] and all(name.endswith(" on mpi cpu") for name in by_status["wrong"]):
        return Finding("operations", "warning", fact, "use the mpirun of the MPI that mpi4py was built with")
    if by_status["wrong"]:
        return Finding("operations", "problem", fact, "do not train over this back end: reinstall torch")
    return Finding("operations", "ok", fact)


def try_as_rank(backend: str, device: str) -> None:
    """Be one rank: join, try each operation twice, and print the outcome of the second time as JSON."""
    import torch

    from shoal.comm import mpi_transport
    from shoal.config.sections import Runtime
    from shoal.runtime.process import join, leave

    if backend == "mpi":
        torch.set_num_threads(1)
        with mpi_transport.world() as transport:
            _try(_Trials(_OverTransport(transport), transport.rank, torch.device(device)), lambda: None)
        return
    settings = {"device": device, "backend": backend, "timeout_s": 40, "threads": 1}
    process = join(Runtime.model_validate(settings))
    own = process.device
    _try(_Trials(torch.distributed, process.rank, own.torch_device), own.synchronise)
    leave()


def _try(trials: _Trials, synchronise: Callable[[], None]) -> None:
    from shoal.runtime.failure import is_peer_loss

    for name in OPERATIONS:
        outcome: Outcome = {"rank": trials.rank, "operation": name, "status": "works"}
        try:
            getattr(trials, name)()
            began = time.perf_counter()
            right = getattr(trials, name)()
            synchronise()
            outcome["ms"] = round(1e3 * (time.perf_counter() - began), 3)
            if not right:
                outcome["status"] = "wrong"
        # Back ends refuse what they cannot do by any of these, in words that have nothing in common.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if is_peer_loss(error):  # no refusal of the back end, but a fault: it ends the trials
                raise
            outcome |= {"status": "unsupported", "why": (str(error) or type(error).__name__).splitlines()[0]}
        print(json.dumps(outcome), flush=True)


class _OverTransport:
    """Shoal's own collectives under torch.distributed's names; arguments are given by their place."""

    P2POp = staticmethod(partial)

    def __init__(self, transport: Transport) -> None:
        from shoal.comm import collectives

        self._transport, self._collectives = transport, collectives

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._transport, name, None)
        return own or partial(getattr(self._collectives, name), self._transport)

    def batch_isend_irecv(self, begins: Sequence[Callable[[], Handle]]) -> list[Handle]:
        return [begin() for begin in begins]

    def all_reduce(self, tensor: Tensor) -> None:
        self._transport.all_reduce(tensor, "sum")

    def gather(self, tensor: Tensor, outputs: list[Tensor] | None, root: int) -> None:
        self._collectives.gather(self._transport, outputs or [], tensor, root)


class _Trials:
    """Each operation once, on 1 MB that is filled with the rank + 1; True if the result is right."""

    def __init__(self, dist: Any, rank: int, device: Any) -> None:
        """Take torch.distributed, or what has its words."""
        self._dist, self.rank, self._device = dist, rank, device

    def send_recv(self) -> bool:
        tensor = self._own()
        if self.rank == 0:
            self._dist.send(tensor, 1)
        else:
            self._dist.recv(tensor, 0)
        return _holds(tensor, 1)

    def isend_irecv(self) -> bool:
        other, theirs, dist = 1 - self.rank, self._full(0), self._dist
        both = [dist.P2POp(dist.isend, self._own(), other), dist.P2POp(dist.irecv, theirs, other)]
        for transfer in dist.batch_isend_irecv(both):
            transfer.wait()
        return _holds(theirs, other + 1)

    def broadcast(self) -> bool:
        tensor = self._own()
        self._dist.broadcast(tensor, 1)
        return _holds(tensor, 2)

    def all_reduce(self) -> bool:
        tensor = self._own()
        self._dist.all_reduce(tensor)
        return _holds(tensor, 3)

    def reduce(self) -> bool:
        tensor = self._own()
        self._dist.reduce(tensor, 0)
        return self.rank == 1 or _holds(tensor, 3)

    def all_gather(self) -> bool:
        tensors = [self._full(0), self._full(0)]
        self._dist.all_gather(tensors, self._own())
        return _holds(tensors[0], 1) and _holds(tensors[1], 2)

    def gather(self) -> bool:
        tensors = [self._full(0), self._full(0)]
        self._dist.gather(self._own(), tensors if self.rank == 0 else None, 0)
        return self.rank == 1 or (_holds(tensors[0], 1) and _holds(tensors[1], 2))

    def scatter(self) -> bool:
        tensor = self._full(0)
        self._dist.scatter(tensor, [self._full(5), self._full(6)] if self.rank == 0 else None, 0)
        return _holds(tensor, 5 + self.rank)

    def reduce_scatter(self) -> bool:
        tensor = self._full(0)
        self._dist.reduce_scatter(tensor, [self._own(), self._own() * 10])
        return _holds(tensor, 30 if self.rank else 3)

    def all_to_all(self) -> bool:
        tensors = [self._full(0), self._full(0)]
        self._dist.all_to_all(tensors, [self._own() * 10, self._own() * 10 + 1])
        return _holds(tensors[0], 10 + self.rank) and _holds(tensors[1], 20 + self.rank)

    def barrier(self) -> bool:
        self._dist.barrier()
        return True

    def _full(self, value: float) -> Tensor:
        import torch

        return torch.full((_NUMEL,), float(value), device=self._device)

    def _own(self) -> Tensor:
        return self._full(self.rank + 1)


def _holds(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())
