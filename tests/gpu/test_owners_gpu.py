"""Owners of weights that lie on a CUDA device; the ranks are threads that share it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.comm.thread_transport import run_ranks
from shoal.strategies.owners import Owners
from tests.gpu.training import run
from tests.strategies.owned import SHAPES, STRATEGIES, gradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_on_a_gpu_are_updated_by_the_sum(strategy):
    def work(transport):
        if not strategy.startswith("central"):
            transport.device = torch.device("cuda:0")
        weights = {
            name: nn.Parameter(torch.ones(shape, device="cuda", dtype=torch.float64))
            for name, shape in SHAPES.items()
        }
        owners = Owners(weights, strategy, transport, torch.float64)
        for name, weight in weights.items():
            weight.grad += gradient(name, transport.rank).cuda()
        owners.run()
        for weight in owners.owned.values():
            weight.data -= weight.grad
        owners.after_step(1)
        torch.cuda.synchronize()
        return {name: weight.detach().cpu() for name, weight in weights.items()}

    for weights in run_ranks(3, work):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, 1 - sum(gradient(name, rank) for rank in range(3)))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_equals_plain_all_reduce(tmp_path, data, strategy):
    owned, _, _ = run(tmp_path / "owned", data, sync={"strategy": strategy})
    plain, _, _ = run(tmp_path / "plain", data)
    torch.testing.assert_close(owned, plain, rtol=2e-6, atol=0)
