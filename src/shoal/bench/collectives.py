"""`shoal bench collectives`: compare all-reduce algorithms with the back end's own, by size."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from shoal.bench.ranks import on_ranks
from shoal.bench.record import begin, describe
from shoal.bench.sizes import in_words, parse_bytes
from shoal.comm.all_reduce import ALGORITHMS, all_reduce
from shoal.comm.collectives import barrier
from shoal.comm.transport import Transport
from shoal.errors import InputError, counted
from shoal.plan.link_cost import Cost, Link, all_reduce_cost, fit_link, hierarchical_cost
from shoal.runtime.files import check_targets, write_json

_BUDGET_S = 0.4  # time for the repeats of one algorithm and size
_MOST_REPEATS = 50
_PATTERN = 3  # whole numbers below it are summed: exact in bf16 too, on up to 128 ranks


@dataclass(frozen=True)
class CollectivesOptions:
    """What to measure."""

    algorithms: tuple[str, ...]  # empty: all that differ here
    sizes: tuple[int, ...]  # bytes
    dtype: str


@dataclass(frozen=True)
class CollectivesRow:
    """Algorithm at one size: the columns of nccl-tests, and the time by formula."""

    algorithm: str
    num_bytes: int
    count: int
    seconds: float  # of the slowest rank, median of the repeats
    wrong: int  # elements, on all ranks
    size: int
    hosts: tuple[int, ...]  # ranks of each

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the tensor divided by the time."""
        return self.num_bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes that each rank sends in the best algorithm, divided by the time of this one."""
        return self.algorithm_bandwidth * 2 * (self.size - 1) / self.size


def measure(
    transport: Transport, tell: Callable[[str], None], options: CollectivesOptions
) -> list[CollectivesRow]:
    """Time each algorithm at each size, taking turns. Collective over the transport's ranks."""
    dtype = getattr(torch, options.dtype)
    algorithms = options.algorithms or _all_that_differ(transport, dtype, tell)
    rows = []
    for num_bytes in options.sizes:
        count = max(1, num_bytes // dtype.itemsize)
        samples: dict[str, list[float]] = {algorithm: [] for algorithm in algorithms}
        wrong = {}
        for algorithm in algorithms:
            tell(f"all-reduce of {in_words(num_bytes)} on {counted(transport.size, 'rank')}: {algorithm}")
            wrong[algorithm] = _count_wrong(transport, algorithm, count, dtype)
        tensor = torch.ones(count, dtype=dtype, device=transport.device)
        first = {algorithm: time_all_reduce(transport, algorithm, tensor.zero_()) for algorithm in algorithms}
        repeats = {
            algorithm: max(3, min(_MOST_REPEATS, int(_BUDGET_S / seconds)))
            for algorithm, seconds in first.items()
        }
        for repeat in range(max(repeats.values())):
            for algorithm in algorithms:
                if repeat < repeats[algorithm]:
                    samples[algorithm].append(time_all_reduce(transport, algorithm, tensor.zero_()))
        rows += [
            CollectivesRow(
                algorithm,
                count * dtype.itemsize,
                count,
                statistics.median(samples[algorithm]),
                wrong[algorithm],
                transport.size,
                tuple(map(len, transport.hosts)),
            )
            for algorithm in algorithms
        ]
    return rows


def _all_that_differ(transport: Transport, dtype: torch.dtype, tell: Callable[[str], None]) -> list[str]:
    """Return all algorithms, except those equal to another one here, and unsupported ones."""
    several = len(transport.hosts) > 1
    algorithms = [name for name in ALGORITHMS if several or name != "hierarchical"]
    try:
        all_reduce(transport, torch.zeros(1, dtype=dtype, device=transport.device), algorithm="backend")
    except InputError as error:
        tell(f"backend is skipped: {error}")
        algorithms.remove("backend")
    return algorithms


def time_all_reduce(transport: Transport, algorithm: str, tensor: torch.Tensor) -> float:
    """Return the seconds of one all-reduce on the slowest rank. Collective over the transport's ranks."""
    barrier(transport)  # earlier work is done, on the device too
    begin = time.perf_counter()
    all_reduce(transport, tensor, algorithm=algorithm)
    transport.synchronise()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=transport.device)
    all_reduce(transport, seconds, "maximum", "tree")
    return seconds.item()


def _count_wrong(transport: Transport, algorithm: str, count: int, dtype: torch.dtype) -> int:
    """Sum known numbers; return the number of wrong elements on all ranks."""
    phases = torch.arange(count, dtype=torch.int32, device=transport.device).remainder_(_PATTERN)
    sums = [sum((phase + rank) % _PATTERN for rank in range(transport.size)) for phase in range(_PATTERN)]
    expected = torch.tensor(sums, dtype=dtype, device=transport.device)[phases]
    tensor = phases.add_(transport.rank).remainder_(_PATTERN).to(dtype)
    del phases
    all_reduce(transport, tensor, algorithm=algorithm)
    wrong = tensor.ne(expected).sum().view(1)
    all_reduce(transport, wrong, "sum", "tree")
    return int(wrong.item())


def command(
    nproc: int,
    transport: str,
    algorithms: tuple[str, ...],
    sizes: tuple[str, str],
    dtype: str,
    json: Path | None,
    plot: Path | None,
) -> int:
    """Measure, print the table and the fitted link; return 1 if any result was wrong."""
    for algorithm in algorithms:
        if algorithm not in ALGORITHMS:
            raise InputError(
                f"unknown all-reduce algorithm {algorithm!r}", hint=f"choose from {', '.join(ALGORITHMS)}"
            )
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib", hint="pip install 'shoal[report]'")
    check_targets(json, plot)
    options = CollectivesOptions(
        tuple(dict.fromkeys(algorithms)), _sizes_between(*map(parse_bytes, sizes)), dtype
    )
    begin()
    rows: list[CollectivesRow] | None = on_ranks(nproc, transport, measure, options)
    if rows is None:  # another rank reports
        return 0
    names = dict.fromkeys(row.algorithm for row in rows)
    links = {name: fit([row for row in rows if row.algorithm == name]) for name in names}
    _print(rows, links, dtype)
    if json is not None:
        write_json(json, _report(rows, links, transport, dtype))
    if plot is not None:
        _draw(rows, links, plot)
    return int(any(row.wrong for row in rows))


def _sizes_between(least: int, most: int) -> tuple[int, ...]:
    """Return sizes from the smallest on, each four times the previous one."""
    if not 0 < least <= most:
        raise InputError(
            f"--sizes {least} {most}: the first must be above 0 and not above the second",
            hint="--sizes 1KB 256MB",
        )
    sizes = [least]
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def fit(rows: list[CollectivesRow]) -> Link | None:
    """Fit a link to the times of an algorithm; None if it has no formula, or there is one size."""
    if rows[0].algorithm == "backend":
        return None
    return fit_link([_cost(row) for row in rows], [row.seconds for row in rows])


def _cost(row: CollectivesRow) -> Cost:
    if row.algorithm == "hierarchical":
        return hierarchical_cost(max(row.hosts), len(row.hosts), row.num_bytes)
    return all_reduce_cost(row.algorithm, row.size, row.num_bytes)


def _expected_s(row: CollectivesRow, link: Link | None) -> float | None:
    return _cost(row).seconds(link) if link else None


def _print(rows: list[CollectivesRow], links: dict[str, Link | None], dtype: str) -> None:
    """Print the columns of nccl-tests, the time by formula, and the fitted links."""
    title = f"all-reduce on {counted(rows[0].size, 'rank')}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    headings = (
        "size",
        "count",
        "type",
        "algorithm",
        "time\n(ms)",
        "algbw\n(GB/s)",
        "busbw\n(GB/s)",
        "#wrong",
    )
    for heading in (*headings, "formula\n(ms)"):
        table.add_column(
            heading, justify="left" if heading in ("type", "algorithm") else "right", no_wrap=True
        )
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.num_bytes != row.num_bytes:
            table.add_section()
        expected = _expected_s(row, links[row.algorithm])
        table.add_row(
            in_words(row.num_bytes),
            f"{row.count:,}",
            dtype,
            row.algorithm,
            f"{row.seconds * 1e3:,.3f}",
            f"{row.algorithm_bandwidth / 1e9:.3f}",
            f"{row.bus_bandwidth / 1e9:.3f}",
            str(row.wrong) if not row.wrong else f"[red]{row.wrong:,}[/]",
            "" if expected is None else f"{expected * 1e3:,.3f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    for algorithm, link in links.items():
        if link:
            console.print(
                f"{algorithm}: fitted latency {link.latency_s * 1e6:,.0f} us, bandwidth "
                f"{link.bytes_per_s / 1e9:.3f} GB/s",
                highlight=False,
            )


def _report(
    rows: list[CollectivesRow], links: dict[str, Link | None], transport: str, dtype: str
) -> dict[str, Any]:
    return {
        **describe("collectives"),
        "ranks": rows[0].size,
        "transport": transport,
        "dtype": dtype,
        "links": {name: None if link is None else asdict(link) for name, link in links.items()},
        "rows": [
            {
                "size": row.num_bytes,
                "count": row.count,
                "algorithm": row.algorithm,
                "time_s": row.seconds,
                "algbw_bytes_per_s": row.algorithm_bandwidth,
                "busbw_bytes_per_s": row.bus_bandwidth,
                "wrong": row.wrong,
                "formula_s": _expected_s(row, links[row.algorithm]),
            }
            for row in rows
        ],
    }


def _draw(rows: list[CollectivesRow], links: dict[str, Link | None], path: Path) -> None:
    """Plot measured times over sizes, with the formulas as thin lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    title = f"all-reduce on {counted(rows[0].size, 'rank')}"
    axes = figure.add_subplot(xlabel="bytes", ylabel="seconds", xscale="log", yscale="log", title=title)
    for algorithm, link in links.items():
        own = [row for row in rows if row.algorithm == algorithm]
        sizes = [row.num_bytes for row in own]
        (line,) = axes.plot(sizes, [row.seconds for row in own], marker="o", markersize=3, label=algorithm)
        if link:
            axes.plot(
                sizes,
                [_cost(row).seconds(link) for row in own],
                linewidth=0.7,
                linestyle="--",
                color=line.get_color(),
            )
    axes.grid(alpha=0.3)
    axes.legend(title="dashed: by formula")
    figure.savefig(path, dpi=120)
