"""`shoal bench ceilings` and `products` on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from shoal.bench import ceilings
from shoal.bench.ceilings import Ceiling, measure
from shoal.bench.products import command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_products_memory_and_copies_have_rates(monkeypatch):
    monkeypatch.setattr(ceilings, "_link", lambda: Ceiling("link", "cuda", "nccl", 0, 0))
    rows = [row for row in measure((1,), 0.05, 1024, 1 << 26) if row.device == "cuda"][:-1]
    copies = [(what, kind) for kind in ("pinned", "pageable") for what in ("to device", "from device")]
    products = [("matmul", kind) for kind in ("fp32", "bf16", "fp16", "tf32")]
    expected = [*products, ("copy", "fp32"), ("triad", "fp32"), *copies]
    assert [(row.what, row.kind) for row in rows] == expected
    assert all(row.rate > 0 and row.threads == 0 for row in rows)
    assert not torch.backends.cuda.matmul.allow_tf32


def test_all_ways_compute_the_same(capsys):
    shapes = {"gemm": (64, 128, 1024), "conv": (4, 16, 32, 27), "kernels": (1, 5)}
    assert command(**shapes, threads=1, seconds=0.01, device="cuda", output=None) == 0
