"""A tensor left on the CPU fails the rehearsal: each case plants one."""

from __future__ import annotations

import pytest
import torch

from shoal.config.layout import parse_layout
from shoal.models import documents
from shoal.parallel import tensor
from shoal.parallel.apply import CutModel
from shoal.strategies import codecs
from shoal.tasks.feed import Feed
from shoal.train import optimiser
from tests.rehearse.fake_cuda import DEVICE, fake_rank
from tests.rehearse.ranks import rehearse, values_of
from tests.tiny_dataset import random_dataset


def _batches_stay(patch):
    plain = Feed.micro_batches

    def stay(feed, batch):
        feed._device = torch.device("cpu")
        return plain(feed, batch)

    patch.setattr(Feed, "micro_batches", stay)


def _positions_stay(patch):
    plain = documents.restarted_positions
    patch.setattr(
        documents, "restarted_positions", lambda ids: torch.zeros(plain(ids).shape, dtype=torch.long)
    )


def _one_gradient_stays(patch):
    plain = optimiser.unscale_gradients

    def stay(model, scale):
        weight = next(iter(model.updated_weights().values()))
        weight.grad = torch.zeros(weight.shape)
        return plain(model, scale)

    patch.setattr("shoal.train.step.unscale_gradients", stay)


def _signs_stay(patch):
    patch.setattr(codecs, "_signs", lambda like: torch.ones(256, 8))


def _gathered_stays(patch):
    plain = tensor.Axis.all_gather
    patch.setattr(tensor.Axis, "all_gather", lambda axis, x: plain(axis, x).cpu())


def _total_stays(patch):
    plain = CutModel.forward_backward

    def stay(model, micro_batches, factor):
        model.device = torch.device("cpu")
        return plain(model, micro_batches, factor)

    patch.setattr(CutModel, "forward_backward", stay)


PLANTS = {
    "a total of losses": (_total_stays, "zero1x1", {"parallel": {"offload": True}}),
    "batches": (_batches_stay, "1", {}),
    "positions": (_positions_stay, "1", {"data": {"reset_documents": True}}),
    "a gradient": (_one_gradient_stays, "1", {}),
    "a codec's table": (_signs_stay, "dp2", {"sync": {"strategy": "onebit"}}),
    "what tensor ranks gathered": (_gathered_stays, "tp2+sp", {}),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_tensor_that_stays_on_the_cpu_fails(tmp_path, monkeypatch, plant):
    put, layout, sections = PLANTS[plant]
    put(monkeypatch)
    values = values_of(random_dataset(tmp_path / "walk"), layout, **sections)
    with pytest.raises((RuntimeError, AssertionError), match=r"device|cpu"):
        rehearse(tmp_path / "run", values, parse_layout(layout).world_size)


def test_a_gradient_for_another_device_is_refused():
    with fake_rank():
        weight = torch.ones(3, device=DEVICE, requires_grad=True)

        class ToHost(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return gradient.cpu()

        with pytest.raises(AssertionError, match="cpu into cuda"):
            ToHost.apply(weight).sum().backward()
