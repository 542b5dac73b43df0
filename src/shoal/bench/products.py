"""`shoal bench products`: ways to compute one matrix product, an update by it, and one convolution.

Each result is compared with one in float64 before its times count.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from shoal.bench import record
from shoal.bench.ceilings import Make, Repeats, time_call
from shoal.bench.screen import make_table, show
from shoal.errors import InputError
from shoal.runtime.cores import physical_cores
from shoal.runtime.device import Device, select_device
from shoal.runtime.files import check_targets, write_json

TOLERANCE = 1e-5  # of the largest element of the result
_LR = 1e-3
_SEED = 1234
_MULTIPLE = 8  # FFTs are padded to a multiple of it


@dataclass
class Way(Repeats):
    """A way to compute something."""

    group: str
    way: str
    flop: float  # by the direct formula, whatever the way does
    error: float = 0.0  # largest difference from float64, as a part of the largest element


def compare(
    group: str, flop: float, ways: dict[str, Make], reference: Tensor, on: Device, seconds: float
) -> Iterator[Way]:
    """Yield each way: with its times if its first result is the reference within TOLERANCE."""
    for way, make in ways.items():
        row = Way(group, way, flop)

        def check(result: Tensor, row: Way = row) -> str:
            row.error = float((result.double() - reference).abs().max() / reference.abs().max())
            wrong = not row.error <= TOLERANCE  # NaN is wrong, too
            return (
                f"rejected: it differs from float64 by {row.error:.1g} of the largest element"
                if wrong
                else ""
            )

        time_call(row, make, on, seconds, check)
        yield row


def matrix_product(samples: int, outputs: int, inputs: int, on: Device, seconds: float) -> Iterator[Way]:
    """Yield ways to compute A B^T, the output of a layer, and B - lr G^T A, its gradient and update."""
    sizes = ((samples, inputs), (outputs, inputs), (samples, outputs))
    a, b, g = (torch.randn(*size, device=on.torch_device) for size in sizes)

    def copied_before() -> Callable[[], Tensor]:
        copy = b.t().contiguous()
        return lambda: a @ copy

    def updated(update: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        weight = b.clone()
        return lambda: update(weight)

    output: dict[str, Make] = {
        "B as stored, its transpose to the BLAS": lambda: lambda: a @ b.t(),
        "copy of B^T made before": copied_before,
        "copy of B^T, then product": lambda: lambda: a @ b.t().contiguous(),
    }
    update: dict[str, Make] = {
        "gradient, then update": lambda: updated(lambda weight: weight.add_(g.t() @ a, alpha=-_LR)),
        "both in one call (addmm)": lambda: updated(lambda weight: weight.addmm_(g.t(), a, alpha=-_LR)),
    }
    what, flop = f"A ({samples} x {inputs}), B ({outputs} x {inputs})", 2.0 * samples * outputs * inputs
    wide_a, wide_b = a.double(), b.double()
    yield from compare(f"A B^T: {what}", flop, output, wide_a @ wide_b.t(), on, seconds)
    wide_b.addmm_(g.double().t(), wide_a, alpha=-_LR)
    yield from compare(f"B - lr G^T A: {what}", flop, update, wide_b, on, seconds)


def convolution(shape: tuple[int, int, int, int], kernel: int, on: Device, seconds: float) -> Iterator[Way]:
    """Yield ways to compute a convolution of stride 1, padded so that the size stays."""
    samples, channels, outputs, size = shape
    images = torch.randn(samples, channels, size, size, device=on.torch_device)
    weight = torch.randn(outputs, channels, kernel, kernel, device=on.torch_device)
    ways: dict[str, Make] = {
        "library's choice": lambda: lambda: F.conv2d(images, weight, padding=kernel // 2),
        "im2col, one product": lambda: lambda: im2col(images, weight),
        "direct, a product for each offset": lambda: lambda: direct(images, weight),
        "FFT": lambda: lambda: by_fft(images, weight),
    }
    flop = 2.0 * samples * outputs * size**2 * channels * kernel**2
    group = f"{kernel} x {kernel}, {channels} to {outputs} channels, {size} x {size}, batch {samples}"
    reference = F.conv2d(images.double(), weight.double(), padding=kernel // 2)
    yield from compare(group, flop, ways, reference, on, seconds)


def im2col(images: Tensor, weight: Tensor) -> Tensor:
    """Convolve by one product with the columns of all windows (unfold)."""
    columns = F.unfold(images, weight.shape[-1], padding=weight.shape[-1] // 2)
    return (weight.flatten(1) @ columns).view(len(images), len(weight), *images.shape[2:])


def direct(images: Tensor, weight: Tensor) -> Tensor:
    """Convolve by adding, for each offset in the kernel, a product with the shifted images; no im2col."""
    kernel, (rows, columns) = weight.shape[-1], images.shape[2:]
    padded = F.pad(images, [kernel // 2] * 4)
    offsets = weight.permute(2, 3, 0, 1).contiguous()
    total = images.new_zeros(len(images), len(weight), rows * columns)
    for i in range(kernel):
        for j in range(kernel):
            total += offsets[i, j] @ padded[:, :, i : i + rows, j : j + columns].flatten(2)
    return total.view(len(images), len(weight), rows, columns)


def by_fft(images: Tensor, weight: Tensor) -> Tensor:
    """Convolve by products of Fourier transforms, padded so that nothing wraps around."""
    kernel, (rows, columns) = weight.shape[-1], images.shape[2:]
    padded = F.pad(images, [kernel // 2] * 4)
    size = [-(-side // _MULTIPLE) * _MULTIPLE for side in padded.shape[2:]]
    spectra = torch.fft.rfft2(padded, s=size), torch.fft.rfft2(weight, s=size).conj()
    product = torch.einsum("ncyx,ocyx->noyx", *spectra)
    return torch.fft.irfft2(product, s=size)[..., :rows, :columns]


def command(
    gemm: tuple[int, int, int],
    conv: tuple[int, int, int, int],
    kernels: tuple[int, ...],
    threads: int,
    seconds: float,
    device: str,
    output: Path | None,
) -> int:
    """Measure, print and record; return 1 if a way failed or was rejected."""
    if min(*gemm, *conv, *kernels) < 1 or seconds <= 0 or threads < 0:
        raise InputError("--gemm, --conv, --kernels, --threads and --seconds must be above 0")
    if any(kernel % 2 == 0 for kernel in kernels):
        raise InputError(
            f"--kernels {min(kernels, key=lambda k: k % 2)} is even", hint="use odd sizes: 1 3 5"
        )
    check_targets(output)
    record.begin()
    on = select_device(device, 0, 1)
    torch.set_num_threads(threads or physical_cores())
    torch.manual_seed(_SEED)
    groups = [matrix_product(*gemm, on, seconds)]
    groups += [convolution(conv, kernel, on, seconds) for kernel in kernels]
    rows: list[Way] = []
    for row in (row for group in groups for row in group):
        rows.append(row)
        print(f"{row.group}, {row.way}: {row.reason or 'measured'}", file=sys.stderr)
    if output is not None:
        about = {"device": on.torch_device.type, "threads": torch.get_num_threads()}
        write_json(output, {**record.describe("products"), **about, "rows": [asdict(row) for row in rows]})
    show(table_of(rows))
    return int(any(row.reason for row in rows))


def table_of(rows: Sequence[Way]) -> Table:
    """Return the rows group by group, each compared with the first of its group."""
    notes = [f"error: largest difference from float64 / largest element, at most {TOLERANCE:g}"]
    notes += [f"{row.way}: {row.reason}" for row in rows if row.reason]
    table = make_table([""], ["ms", "GFLOP/s", "time", "error"], notes)
    first_s: dict[str, float] = {}  # by group
    for row in rows:
        if row.group not in first_s:
            table.add_section()
            table.add_row(row.group)
        median_s = statistics.median(row.samples or [0.0])
        base_s = first_s.setdefault(row.group, median_s)
        shown = ["-"]
        if median_s:
            shown = [f"{1e3 * median_s:,.2f}", f"{row.flop / median_s / 1e9:,.1f}"]
            shown += [f"{median_s / base_s:.2f}x" if base_s else "", f"{row.error:.0e}"]
        table.add_row(f"  {row.way}", *shown)
    return table
