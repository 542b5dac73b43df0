"""The one place that sees every operation between ranks, whoever calls for it; it knows torch's inside.

All of torch.distributed's Python functions end in methods of ProcessGroup: our own calls, DDP's hook,
FSDP2, pipelines, object collectives. They are replaced by ones that note the call first, as seen on torch
2.11 to 2.13. Not seen: DDP's reducer without a hook, and the operators of traced code; Shoal uses neither.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from shoal.runtime.flight_recorder import FlightRecorder, Issued, install

_METHOD = re.compile(
    r"_?(all_?reduce|reduce_scatter|reduce|broadcast|all_?gather|gather|scatter|all_?to_?all|send|recv|(?:monitored_)?barrier)"
    r"(_base|_single|(_into|_single)?(_tensor)?_coalesced)?"
)
# Which argument has the same shape on all ranks, if not the first one; None: shapes may differ.
_COMPARED = {"all_gather": 1, "gather": 1, "all_to_all": None, "barrier": None}
# Under way over NCCL: to wait for one of these only has a stream wait, and the host goes on.
_on_gpus: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def recorded(recorder: FlightRecorder) -> Iterator[None]:
    """Note every operation between ranks in `recorder` while the context lasts."""
    replaced: dict[tuple[type, str], tuple[Any, Any]] = {}
    for method, original in vars(dist.ProcessGroup).items():
        if found := _METHOD.fullmatch(method):
            replaced[dist.ProcessGroup, method] = original, _noting(_spoken(found[1]), original, recorder)
    group, name = dist.ProcessGroup, "_end_coalescing"
    replaced[group, name] = vars(group)[name], _noting_device(vars(group)[name])
    wait = vars(dist.Work)["wait"]
    replaced[dist.Work, "wait"] = wait, _waiting(wait, recorder)
    try:
        for (owner, method), (_, noted) in replaced.items():
            setattr(owner, method, noted)
        install(recorder)
        yield
    finally:
        install(None)
        for (owner, method), (original, _) in replaced.items():
            setattr(owner, method, original)
        recorder.close()


def _spoken(method: str) -> str:
    """Return torch.distributed's name of what a method does: all_reduce for allreduce."""
    name = re.sub("^all_?", "all_", method.removeprefix("monitored_"))
    return "all_to_all" if name == "all_toall" else name


def _noting(name: str, method: Callable[..., Any], recorder: FlightRecorder) -> Callable[..., Any]:
    def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        recorder.record(name, lambda: _look(name, group, args))
        work = method(group, *args, **kwargs)
        tensor = _first(args[0]) if args else None
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda and work is not None:
            _on_gpus.add(work)
        return work

    return noted


def _noting_device(end: Callable[..., Any]) -> Callable[..., Any]:
    def noted(group: dist.ProcessGroup, device: torch.device) -> Any:
        work = end(group, device)
        if device.type == "cuda" and work is not None:
            _on_gpus.add(work)
        return work

    return noted


def _look(name: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> Issued:
    index = _COMPARED.get(name, 0)
    tensor = None if index is None or index >= len(args) else _first(args[index])
    direction = ""
    if name in ("send", "recv"):
        ends = (group.rank(), args[1])
        direction = "{}>{}".format(*(ends if name == "send" else reversed(ends)))
    return Issued(group.group_name, direction, tensor, lambda: _about(group, direction))


def _first(value: Any) -> Any:
    """Return the first of what lists hold, None where they are empty."""
    while isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value


def _waiting(wait: Callable[..., Any], recorder: FlightRecorder) -> Callable[..., Any]:
    def waited(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        recorder.wait(1)
        try:
            done = wait(work, *args, **kwargs)
            if work in _on_gpus:
                recorder.wait_until(torch.cuda.current_stream().record_event().query)
            return done
        finally:
            recorder.wait(-1)

    return waited


def _about(group: dist.ProcessGroup, direction: str) -> tuple[str, list[int]]:
    """Return a group's description and its ranks in the world, of which `direction` names two."""
    ranks = dist.get_process_group_ranks(group)
    if direction:
        ranks = sorted(ranks[int(end)] for end in direction.split(">"))
    return "" if group.group_desc in ("undefined", "default_pg") else group.group_desc, ranks
