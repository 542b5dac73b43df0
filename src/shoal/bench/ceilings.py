"""`shoal bench ceilings`: rates of this machine that bound a step: matrix products, memory, copies, link."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from shoal.bench import collectives, record
from shoal.bench.ranks import on_ranks
from shoal.bench.screen import make_table, show
from shoal.config.sections import Runtime
from shoal.errors import InputError, ShoalError
from shoal.plan.link_cost import Link, all_reduce_cost
from shoal.runtime.cores import physical_cores
from shoal.runtime.device import Device, compute_fp32_in_full, has_fast_products, select_device
from shoal.runtime.files import check_targets, write_json

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIDE = {"cpu": 1024, "cuda": 8192}  # of the matrices
_SLOW_SIDE = 256  # if the format is not in the hardware
_LEAST, _MOST = 3, 1000  # repeats
_LINK_BYTES = tuple(1 << power for power in range(12, 25, 4))
_RANKS = 2

Act = Callable[[], Any]
Make = Callable[[], Act]  # what it does before it returns the call is not timed


@dataclass
class Repeats:
    """Times of a call, or the reason why there are none."""

    samples: list[float] = field(default_factory=list, kw_only=True)  # seconds
    reason: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        """Raise a ValueError for times that a record cannot have."""
        if self.samples and not min(self.samples) > 0:
            raise ValueError("samples must be above 0")


@dataclass
class Ceiling(Repeats):
    """A rate; `kind` is the number format, how the host's memory is held, or what joins the ranks."""

    what: str  # matmul, copy, triad, to device, from device, link
    device: str  # cpu, cuda
    kind: str
    threads: int  # 0: they do not matter
    size: int  # rows and columns of the matrices, or bytes of an array
    rate: float = 0.0  # FLOP/s or bytes/s by the median; of a link, one way, fitted to medians by size
    latency_s: float = 0.0  # of a link


def repeat(
    act: Act, on: Device, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds of each call, until `seconds` have passed; a call ends when the device is done."""
    samples: list[float] = []
    while len(samples) < _LEAST or (sum(samples) < seconds and len(samples) < _MOST):
        on.synchronise()
        began = clock()
        act()
        on.synchronise()
        samples.append(clock() - began)
    return samples


def time_call(row: Repeats, make: Make, on: Device, seconds: float, check: Callable[[Any], str]) -> None:
    """Fill in the times of a call, unless `check` says what is wrong with its first result."""
    try:
        act = make()
        row.reason = check(act())
        row.samples = [] if row.reason else repeat(act, on, seconds)
    except (RuntimeError, MemoryError) as error:  # no memory, or no kernel for the format
        row.reason = str(error).partition("\n")[0] or type(error).__name__


def measure(threads: Sequence[int], seconds: float, side: int, num_bytes: int) -> Iterator[Ceiling]:
    """Yield the rates of the CPU by number of threads, of the GPU if there is one, and of the link.

    `side` is that of the square matrices, 0 for one by device and format; `num_bytes` that of an array.
    """
    for name in dict.fromkeys(("cpu", select_device("auto", 0, 1).torch_device.type)):
        on = select_device(name, 0, 1)
        for count in threads if name == "cpu" else (0,):
            torch.set_num_threads(count or physical_cores())
            for what, kind, size, amount, make in _jobs(on, side, num_bytes):
                row = Ceiling(what, name, kind, count, size)
                time_call(row, make, on, seconds, lambda _: "")
                row.rate = amount / statistics.median(row.samples) if row.samples else 0.0
                yield row
    compute_fp32_in_full()
    yield _link()


def _jobs(on: Device, side: int, num_bytes: int) -> Iterator[tuple[str, str, int, float, Make]]:
    """Yield what is timed, its kind and size, its operations or bytes, and what makes the call."""
    device = on.torch_device
    for kind, dtype in (_FORMATS | ({"tf32": torch.float32} if on.is_cuda else {})).items():
        n = side or (_SIDE[device.type] if has_fast_products(dtype, device) else _SLOW_SIDE)
        yield "matmul", kind, n, 2.0 * n**3, partial(_product, device, dtype, n, kind == "tf32")
    for what, arrays in (("copy", 2), ("triad", 3)):
        yield what, "fp32", num_bytes, float(arrays * num_bytes), partial(_stream, device, num_bytes, arrays)
    for kind in ("pinned", "pageable") if on.is_cuda else ():
        for what in ("to device", "from device"):
            make = partial(_transfer, device, num_bytes, kind == "pinned", what == "to device")
            yield what, kind, num_bytes, float(num_bytes), make


def _product(device: torch.device, dtype: torch.dtype, side: int, tf32: bool) -> Act:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _stream(device: torch.device, num_bytes: int, arrays: int) -> Act:
    """Return a = b, or a = b + 2 c, whose bytes count as in STREAM: each array once."""
    a, b, *more = (torch.ones(num_bytes // 4, device=device) for _ in range(arrays))
    return partial(torch.add, b, *more, alpha=2, out=a) if more else partial(a.copy_, b)


def _transfer(device: torch.device, num_bytes: int, pinned: bool, to_device: bool) -> Act:
    host, far = torch.ones(num_bytes // 4, pin_memory=pinned), torch.ones(num_bytes // 4, device=device)
    target, source = (far, host) if to_device else (host, far)
    return partial(target.copy_, source, non_blocking=True)


def _link() -> Ceiling:
    """Fit the link between two ranks of this host: NCCL between two GPUs, else gloo between processes."""
    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.device_count() >= _RANKS else "cpu"
    row = Ceiling("link", device, "nccl" if device == "cuda" else "gloo", 0, _LINK_BYTES[-1])
    asked = collectives.CollectivesOptions(("chunked_ring",), _LINK_BYTES, "float32")
    try:
        rows = on_ranks(_RANKS, "torch", collectives.measure, asked, runtime=Runtime(device=device))
    except ShoalError as error:
        row.reason = error.message
        return row
    row.samples = [each.seconds for each in rows]
    if (link := collectives.fit(rows)) is None:
        row.reason = "the times give no bandwidth"
    else:
        row.rate, row.latency_s = link.bytes_per_s, link.latency_s
    return row


def share(
    multiply_adds_per_s: float,
    rows: Sequence[Ceiling],
    *,
    threads: int,
    kind: str = "fp32",
    device: str = "cpu",
) -> float | None:
    """Return which part of the measured matrix rate a program reaches; None if that was not measured.

    A training step does 3 x multiply-adds x batch: those of the forward pass, and two for each of them in the
    backward pass.
    """
    for row in rows:
        measured = ("matmul", device, kind) == (row.what, row.device, row.kind)
        if measured and row.threads in (0, threads) and row.rate:
            return 2 * multiply_adds_per_s / row.rate
    return None


def exchange_s(
    num_parameters: int, rows: Sequence[Ceiling], *, ranks: int = _RANKS, itemsize: int = 4
) -> float | None:
    """Return the seconds of a chunked ring for all gradients over the measured link, if there is one."""
    for row in rows:
        if row.what == "link" and row.rate:
            cost = all_reduce_cost("chunked_ring", ranks, itemsize * num_parameters)
            return cost.seconds(Link(row.latency_s, row.rate))
    return None


def command(threads: tuple[int, ...], seconds: float, side: int, num_bytes: int, output: Path | None) -> int:
    """Measure, print and record; return 1 if a rate is missing."""
    if seconds <= 0 or min(threads, default=1) < 1 or side < 0 or num_bytes < 4:
        raise InputError("--threads, --seconds, --matrix-size and --memory must be above 0")
    check_targets(output)
    record.begin()
    rows: list[Ceiling] = []
    for row in measure(threads or (physical_cores(),), seconds, side, num_bytes):
        rows.append(row)
        print(f"{row.what} {row.device} {row.kind}: {row.reason or 'measured'}", file=sys.stderr)
    if output is not None:
        write_json(output, {**record.describe("ceilings"), "rows": [asdict(row) for row in rows]})
    show(_table(rows))
    return int(any(row.reason for row in rows))


def _table(rows: Sequence[Ceiling]) -> Table:
    notes = [f"{row.what} {row.device} {row.kind}: {row.reason}" for row in rows if row.reason]
    notes += [f"link: fitted latency {row.latency_s * 1e6:,.0f} us" for row in rows if row.latency_s]
    table = make_table(["", "device", "kind"], ["threads", "size", "rate", "repeats"], notes)
    for row in rows:
        is_product = row.what == "matmul"
        size = f"{row.size} x {row.size}" if is_product else f"{row.size / 1e6:,.0f} MB"
        rate = f"{row.rate / 1e9:,.4g} {'GFLOP' if is_product else 'GB'}/s" if row.rate else "-"
        about = (row.what, row.device, row.kind, f"{row.threads or ''}", size, rate, f"{len(row.samples)}")
        table.add_row(*about)
    return table
