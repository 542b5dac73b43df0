"""Timing and reading ahead on a GPU: what cannot be seen without one."""

import pytest
import torch

from shoal.data.dataset import open_dataset
from shoal.data.loader import Loader, Windows
from shoal.runtime.device import Device
from shoal.tasks.feed import Feed
from shoal.train.clock import StepClock
from tests.tiny_dataset import random_dataset


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_time_of_a_gpus_phases_is_that_of_its_work():
    device = Device(torch.device("cuda", 0), "cpu:gloo,cuda:nccl", "GPU")
    a = torch.randn(4096, 4096, device="cuda")
    a @ a
    clock = StepClock(device)
    clock.begin()
    with clock.phase("forward"):
        for _ in range(50):
            a @ a
    with clock.phase("backward"):
        pass
    seconds, phases = clock.end().read()
    assert 0.8 * seconds < phases["forward"] <= seconds
    assert phases["backward"] < 0.05 * seconds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_batches_wait_in_page_locked_memory(tmp_path):
    split = open_dataset(random_dataset(tmp_path / "walk")).split("train")
    loader = Loader(Windows([split], 16), weights=(), global_batch_size=8, seed=1, rank=0, world_size=1)
    feed = Feed(loader, lambda batch: (batch.data,), 4, torch.device("cuda", 0))
    batch = feed.batch(1)
    (tokens_bt,) = batch.data
    assert tokens_bt.is_pinned()
    micro = feed.micro_batches(batch)
    assert torch.cat([part for (part,) in micro]).cpu().equal(tokens_bt)
    feed.close()
