"""Where tensors lie when weights or numbers of the host are not where a model computes; meta is the GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.parallel.apply import CutModel
from shoal.parallel.pipeline import Pipeline, _PartModule

META = torch.device("meta")


class Part(nn.Linear):
    """A part of a model that lies in host memory, as offloaded weights do."""

    is_first = is_last = True

    def named_weights(self):
        return dict(self.named_parameters())

    def running_statistics(self):
        return {}


def loss_on_the_device(model, micro, inputs=None):
    return torch.ones((), device=META, requires_grad=True)


def test_losses_of_offloaded_weights_add_up_where_they_are_computed():
    mesh = SimpleNamespace(axes=None)
    model = CutModel([Part(2, 2)], mesh, META, loss_on_the_device, lambda _: nullcontext(), exchange=None)
    assert model.forward_backward([None, None], 1.0).device == META


class Schedule:
    """Takes a step as torch's schedules do, as far as arguments go."""

    def __init__(self, module):
        self._module = module

    def step(self, x, *, target, return_outputs, index):
        assert {tensor.device.type for tensor in (x, target, index)} == {"cpu"}
        for one in index:
            self._module(one, index=one)


@pytest.fixture
def pipeline():
    """A pipeline of one part on a device, without its process group."""
    pipeline = Pipeline.__new__(Pipeline)
    pipeline._device, pipeline._numbers = META, [0]
    pipeline._modules = [_PartModule(Part(2, 2), loss_on_the_device, META)]
    pipeline._schedule = Schedule(pipeline._modules[0])
    return pipeline


def test_a_pipeline_reads_no_number_back_from_the_device_and_copies_none_to_it(pipeline, copies):
    assert pipeline.forward_backward([None, None], 1.0).device == META
    assert copies == []
