"""`shoal bench products`: all ways compute the same, and one that does not has no times."""

import json

import pytest
import torch
import torch.nn.functional as F

from shoal.bench import products
from shoal.bench.products import by_fft, command, compare, direct, im2col
from shoal.errors import InputError
from shoal.runtime.device import select_device


@pytest.mark.parametrize("way", [im2col, direct, by_fft])
@pytest.mark.parametrize("kernel", [1, 3, 5, 11])
def test_convolutions_are_the_librarys(way, kernel):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 7, 9, dtype=torch.float64, generator=generator)
    weight = torch.randn(4, 3, kernel, kernel, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(way(images, weight), F.conv2d(images, weight, padding=kernel // 2))


def test_a_wrong_product_is_rejected_and_one_that_fails_costs_its_row():
    a = torch.arange(6.0).view(2, 3)
    wrong = (a @ a.t()).index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor(5.01))
    ways = {
        "right": lambda: lambda: a @ a.t(),
        "wrong": lambda: lambda: wrong,
        "not a number": lambda: lambda: wrong * float("nan"),
        "impossible": lambda: lambda: a @ a,
    }
    reference = a.double() @ a.double().t()
    rows = list(compare("A A^T", 24.0, ways, reference, select_device("cpu", 0, 1), 1e-9))
    assert [len(row.samples) for row in rows] == [3, 0, 0, 0]
    assert rows[1].reason == "rejected: it differs from float64 by 0.0002 of the largest element"
    assert rows[1].error == pytest.approx(0.01 / 50, rel=1e-4)
    assert "by nan" in rows[2].reason
    assert "shapes" in rows[3].reason


def small(output=None, **changed):
    options = {"gemm": (4, 8, 16), "conv": (2, 3, 4, 7), "kernels": (1, 3), "threads": 1, "seconds": 1e-9}
    return command(**options | changed, device="cpu", output=output)


def test_a_table_and_a_record_of_all_ways(tmp_path, capsys):
    output, threads = tmp_path / "r.json", torch.get_num_threads()
    assert small(output) == 0
    torch.set_num_threads(threads)
    told = json.loads(output.read_text())
    assert (told["name"], told["device"], told["threads"]) == ("products", "cpu", 1)
    assert {"commit", "machine", "versions"} <= told.keys()
    assert all(row["error"] < 1e-6 and len(row["samples"]) >= 3 for row in told["rows"])
    assert [row["flop"] for row in told["rows"]] == [2 * 4 * 8 * 16] * 5 + [2 * 2 * 4 * 49 * 3] * 4 + [
        18 * 2 * 4 * 49 * 3
    ] * 4
    shown = capsys.readouterr().out
    for text in (
        "A B^T: A (4 x 16), B (8 x 16)",
        "both in one call (addmm)",
        "3 x 3, 3 to 4 channels",
        "FFT",
    ):
        assert text in shown


def test_a_convolution_that_is_wrong_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(products, "by_fft", lambda images, weight: direct(images, weight.flip(-1)))
    assert small(kernels=(3,)) == 1
    shown = capsys.readouterr().out
    assert "FFT: rejected: it differs from float64" in shown


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kernels": (3, 4)}, "--kernels 4 is even"),
        ({"gemm": (0, 8, 16)}, "must be above 0"),
        ({"seconds": 0.0}, "must be above 0"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(changed, message):
    with pytest.raises(InputError, match=message):
        small(**changed)
