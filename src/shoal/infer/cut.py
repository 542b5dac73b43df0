"""A model cut along `tp` over several local processes: this one asks, and all compute the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from shoal.errors import ShoalError
from shoal.infer.load import TextModel, load_text_model
from shoal.runtime.device import select_device, share_cores

_PATIENCE = timedelta(seconds=120)  # for a process to start, and for one step of another
_FOREVER = timedelta(days=30)  # between two prompts


@contextmanager
def load_cut(path: Path, device: str, tp: int) -> Iterator[TextModel]:
    """Load a run or checkpoint cut over `tp` processes, which end with this context; 1: in this one."""
    if tp == 1:
        yield load_text_model(path, select_device(device, 0, 1).torch_device)
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_follow, args=(path, device, tp, rank, store.port), daemon=True)
        for rank in range(1, tp)
    ]
    for process in others:
        process.start()

    def check() -> None:
        if lost := [process.exitcode for process in others if process.exitcode is not None]:
            raise ShoalError(f"a process of the cut model ended with status {lost[0]}")

    try:
        loaded, orders = _join(path, device, tp, 0, store)
        yield loaded.led_by(lambda *order: _tell(orders, check, order))
    finally:
        for process in others:
            process.kill()
            process.join()
        if dist.is_initialized():
            dist.destroy_process_group()


def _follow(path: Path, device: str, tp: int, rank: int, port: int) -> None:
    """Compute what rank 0 asks for, until it ends this process."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    loaded, orders = _join(path, device, tp, rank, store)
    while True:
        order: list[Any] = [None]
        dist.broadcast_object_list(order, src=0, group=orders)
        for _ in loaded.generate(*order[0]):
            pass


def _tell(orders: dist.ProcessGroup, check: Callable[[], None], order: tuple[Any, ...]) -> None:
    check()
    dist.broadcast_object_list([order], src=0, group=orders)


def _join(
    path: Path, device: str, tp: int, rank: int, store: dist.Store
) -> tuple[TextModel, dist.ProcessGroup]:
    """Join the processes and load the own part; return it and the group that orders travel in."""
    own = select_device(device, rank, tp)
    share_cores(tp)
    dist.init_process_group(own.backend, store=store, rank=rank, world_size=tp, timeout=_PATIENCE)
    orders = dist.new_group(backend="gloo", timeout=_FOREVER)
    return load_text_model(path, own.torch_device, tp=tp), orders
