"""`shoal bench ceilings`: the clock, how rates are counted, and what programs are measured against."""

import json
from types import SimpleNamespace

import pytest
import torch

from shoal.bench import ceilings
from shoal.bench.ceilings import Ceiling, Repeats, exchange_s, measure, repeat, share, time_call
from shoal.errors import InputError, ShoalError
from tests import commands

LINK = Ceiling("link", "cpu", "gloo", 0, 1 << 24, 1e8, 1e-3)


class Lazy:
    """A device that computes when it is waited for, 2 s for each call, on a clock that it turns itself."""

    def __init__(self):
        self.now, self.asked = 0.0, 0

    def act(self):
        self.asked += 1

    def synchronise(self):
        self.now, self.asked = self.now + 2 * self.asked, 0


def test_a_call_ends_when_the_device_is_done():
    lazy = Lazy()
    lazy.act()  # what was asked for before does not count
    assert repeat(lazy.act, lazy, 9.0, lambda: lazy.now) == [2.0] * 5
    assert repeat(lazy.act, lazy, 1e-9, lambda: lazy.now) == [2.0] * 3


def test_the_first_call_is_not_timed_and_a_wrong_or_failing_one_has_no_times():
    calls, on = [], SimpleNamespace(synchronise=lambda: None)
    good, wrong, failing = Repeats(), Repeats(), Repeats()
    time_call(good, lambda: lambda: calls.append(1), on, 1e-9, lambda result: "")
    assert (len(good.samples), len(calls)) == (3, 4)
    time_call(wrong, lambda: lambda: 3, on, 1e-9, lambda result: f"{result} is wrong")
    assert (wrong.samples, wrong.reason) == ([], "3 is wrong")
    time_call(failing, lambda: lambda: torch.ones(2) @ torch.ones(3), on, 1e-9, lambda result: "")
    assert failing.samples == []
    assert "size" in failing.reason


def test_rates_count_operations_and_bytes(monkeypatch):
    monkeypatch.setattr(ceilings, "_link", lambda: LINK)
    monkeypatch.setattr(ceilings, "repeat", lambda act, *_: act() is None or [0.5, 0.25, 4.0])
    monkeypatch.setattr(ceilings.torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    rows = list(measure((1, 2), 1e-9, 8, 4000))
    torch.set_num_threads(threads)
    matrices = [("matmul", kind, 4 * 8**3) for kind in ("fp32", "bf16", "fp16")]
    expected = [*matrices, ("copy", "fp32", 4 * 4000), ("triad", "fp32", 6 * 4000)]
    assert [(row.what, row.kind, row.rate) for row in rows] == [*expected, *expected, ("link", "gloo", 1e8)]
    assert [row.threads for row in rows] == [1] * 5 + [2] * 5 + [0]


def test_what_is_timed_is_what_is_named():
    cpu = torch.device("cpu")
    copy, triad = (ceilings._stream(cpu, 40, arrays)() for arrays in (2, 3))
    assert (copy.tolist(), triad.tolist()) == ([1.0] * 10, [3.0] * 10)
    product = ceilings._product(cpu, torch.bfloat16, 8, False)()
    assert (product.dtype, product.shape) == (torch.bfloat16, (8, 8))


def test_a_rate_that_cannot_be_measured_costs_its_own_row(monkeypatch, capsys, tmp_path):
    def ends(*_, **options):
        raise ShoalError("rank 1 was killed")

    monkeypatch.setattr(ceilings, "on_ranks", ends)
    output = tmp_path / "r.json"
    assert ceilings.command((1,), 1e-9, 8, 40, output) == 1
    told = json.loads(output.read_text())["rows"]
    assert [row["reason"] for row in told if row["reason"]] == ["rank 1 was killed"]
    assert "link cpu gloo: rank 1 was killed" in capsys.readouterr().out


def test_a_step_is_measured_against_the_products_of_its_threads_and_gradients_against_the_link():
    found = [
        Ceiling("matmul", "cpu", "fp32", 1, 8, 1e9), Ceiling("matmul", "cpu", "fp32", 2, 8, 2e9),
        Ceiling("matmul", "cpu", "bf16", 2, 8, 0.0, reason="no kernel"), LINK,
    ]  # fmt: skip
    multiply_adds, batch, median_s = 1e6, 10, 0.1
    assert share(3 * multiply_adds * batch / median_s, found, threads=2) == pytest.approx(0.3)
    assert share(3e8, found, threads=1) == pytest.approx(0.6)
    assert share(3e8, found, threads=4) is None
    assert share(3e8, found, threads=2, kind="bf16") is None
    assert exchange_s(25_000_000, found) == pytest.approx(2e-3 + 1.0)  # two ranks: each sends all of it once
    assert exchange_s(25_000_000, found, ranks=4) == pytest.approx(6e-3 + 1.5)
    assert exchange_s(1, []) is None


def test_the_command_measures_this_machine(tmp_path):
    output = tmp_path / "r.json"
    words = ("--threads", "1", "--matrix-size", "64", "--memory", "1MB", "--seconds", "0.01")
    done = commands.run("bench", "ceilings", *words, "--output", output, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(output.read_text())
    assert {"commit", "machine", "versions"} <= told.keys()
    assert all(row["rate"] > 0 and len(row["samples"]) >= 3 for row in told["rows"])
    assert {("matmul", "fp16"), ("triad", "fp32"), ("link", "gloo")} <= {
        (row["what"], row["kind"]) for row in told["rows"]
    }
    assert "fitted latency" in done.stdout


def test_sizes_that_cannot_be_measured_are_refused():
    with pytest.raises(InputError, match="must be above 0"):
        ceilings.command((0,), 1.0, 0, 4096, None)
