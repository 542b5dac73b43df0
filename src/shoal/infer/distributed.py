"""A model on several local processes: cut along `tp`, and as replicas. Rank 0 is the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.config.sections import Runtime
from shoal.errors import InputError, counted
from shoal.infer.load import TextModel, load_text_model, resolve_for
from shoal.runtime.device import select_device
from shoal.runtime.process import Process
from shoal.worker_pool import Tell, WorkerPool

_PATIENCE_S = 1800.0  # for one batch of another process
_FOREVER = timedelta(days=30)  # between two prompts
_PRELOAD = (__name__, "torch.distributed.tensor")


@contextmanager
def load_distributed(path: Path, device: str, tp: int, nproc: int = 0) -> Iterator[TextModel]:
    """Load a run or checkpoint on `nproc` processes (0: `tp`), which end with this context; 1: in this one.

    Each `tp` of them are a replica, which shares the model.
    """
    nproc = nproc or tp
    if tp < 1 or nproc < 1 or nproc % tp:
        raise InputError(
            f"--tp {tp} with {counted(nproc, 'process')}: each replica takes --tp of them",
            hint=f"use --nproc {max(1, tp)} or a multiple of it",
        )
    if nproc == 1:
        yield load_text_model(path, select_device(device, 0, 1).torch_device)
        return
    path = resolve_for(path, tp)  # all load the same one, also while a run saves others
    runtime = Runtime.model_validate({"device": device, "timeout_s": _PATIENCE_S})
    with WorkerPool(runtime, _PRELOAD, nproc - 1) as pool, pool.lead(nproc, _follow, path, tp) as process:
        loaded, orders = _load(process, path, tp)

        def order(*method_and_arguments: Any) -> None:
            pool.check()
            dist.broadcast_object_list([method_and_arguments], src=0, group=orders)

        yield loaded.led_by(order)


def _follow(process: Process, tell: Tell, path: Path, tp: int) -> None:
    """Compute what rank 0 asks for, until it ends this process."""
    loaded, orders = _load(process, path, tp)
    while True:
        order: list[Any] = [None]
        dist.broadcast_object_list(order, src=0, group=orders)
        method, *arguments = order[0]
        for _ in getattr(loaded, method)(*arguments):
            pass


def _load(process: Process, path: Path, tp: int) -> tuple[TextModel, dist.ProcessGroup]:
    """Load this process's part; return it and the group over which orders are sent."""
    orders = dist.new_group(backend="gloo", timeout=_FOREVER)
    return load_text_model(path, process.device.torch_device, tp=tp), orders
