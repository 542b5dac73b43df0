"""A model on several local processes: cut along `tp`, and as replicas. This one asks, and all compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from shoal.errors import InputError, ShoalError
from shoal.infer.load import TextModel, load_text_model
from shoal.runtime.device import select_device, share_cores

_PATIENCE = timedelta(minutes=30)  # for a process to start, and for one batch of another
_FOREVER = timedelta(days=30)  # between two prompts


@contextmanager
def load_cut(path: Path, device: str, tp: int, nproc: int = 0) -> Iterator[TextModel]:
    """Load a run or checkpoint on `nproc` processes (0: `tp`), which end with this context; 1: in this one.

    Each `tp` of them are a replica, which shares the model.
    """
    nproc = nproc or tp
    if tp < 1 or nproc < 1 or nproc % tp:
        raise InputError(
            f"--tp {tp} with {nproc} process(es): each replica takes --tp of them",
            hint=f"use --nproc {max(1, tp)} or a multiple of it",
        )
    if nproc == 1:
        yield load_text_model(path, select_device(device, 0, 1).torch_device)
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_follow, args=(path, device, tp, nproc, rank, store.port), daemon=True)
        for rank in range(1, nproc)
    ]
    for process in others:
        process.start()

    def check() -> None:
        if lost := [process.exitcode for process in others if process.exitcode is not None]:
            raise ShoalError(f"a process of the cut model ended with status {lost[0]}")

    try:
        loaded, orders = _join(path, device, tp, nproc, 0, store)
        yield loaded.led_by(lambda *order: _tell(orders, check, order))
    finally:
        for process in others:
            process.kill()
            process.join()
        if dist.is_initialized():
            dist.destroy_process_group()


def _follow(path: Path, device: str, tp: int, nproc: int, rank: int, port: int) -> None:
    """Compute what rank 0 asks for, until it ends this process."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    loaded, orders = _join(path, device, tp, nproc, rank, store)
    while True:
        order: list[Any] = [None]
        dist.broadcast_object_list(order, src=0, group=orders)
        method, *arguments = order[0]
        for _ in getattr(loaded, method)(*arguments):
            pass


def _tell(orders: dist.ProcessGroup, check: Callable[[], None], order: tuple[Any, ...]) -> None:
    check()
    dist.broadcast_object_list([order], src=0, group=orders)


def _join(
    path: Path, device: str, tp: int, nproc: int, rank: int, store: dist.Store
) -> tuple[TextModel, dist.ProcessGroup]:
    """Join the processes and load the own part; return it and the group that orders travel in."""
    own = select_device(device, rank, nproc)
    share_cores(nproc)
    dist.init_process_group(own.backend, store=store, rank=rank, world_size=nproc, timeout=_PATIENCE)
    orders = dist.new_group(backend="gloo", timeout=_FOREVER)
    return load_text_model(path, own.torch_device, tp=tp), orders
