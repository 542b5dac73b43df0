"""Strategies that exchange gradients, on CUDA tensors: ranks are threads, as one device has one rank only."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.thread_transport import run_ranks
from shoal.strategies.compression import CompressedExchange
from tests.strategies.gradients import METHODS, NUMEL, bucket_of, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def sums_on(device: str, method: str, steps: int = 3) -> list[list[torch.Tensor]]:
    def work(transport):
        transport.device = torch.device(device)
        views = bucket_of(torch.zeros(NUMEL, device=device)).views
        exchange = CompressedExchange(method, transport, METHODS[method](views), views)
        sums = []
        for step in range(1, steps + 1):
            own = gradients(2, dtype=torch.float32, seed=step)[transport.rank]
            bucket = bucket_of(own.to(device, non_blocking=True))
            exchange.begin(step, 1.0)
            exchange.start(bucket).wait()
            exchange.end(applied=True)
            sums.append(bucket.flat.cpu())
        return sums

    return run_ranks(2, work)


@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_exchanges_what_a_cpu_does(method):
    for gpu, cpu in zip(sums_on("cuda:0", method), sums_on("cpu", method), strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-4)
