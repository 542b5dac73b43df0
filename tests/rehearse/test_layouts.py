"""Every layout trains with a GPU for each rank: devices, hooks and shapes, on fake tensors."""

from __future__ import annotations

import pytest
import torch

from shoal.config.layout import parse_layout
from tests.rehearse.fake_cuda import DEVICE
from tests.rehearse.ranks import HOST, devices_of, expected_graphs, on, rehearse, values_of

GPT2 = {"dropout": 0.1, "attention_dropout": 0.1}
LLAMA = {"style": "llama", "n_kv_heads": 2}
LAYOUTS = [
    ("1", GPT2, "full"),
    ("1", LLAMA, "selective"),
    ("dp2", GPT2, "none"),
    ("zero1x2", GPT2, "none"),
    ("zero2x2", LLAMA, "none"),
    ("zero3x2", {}, "full"),
    ("tp2", GPT2, "full"),
    ("tp2", LLAMA, "selective"),
    ("tp2+sp", LLAMA | GPT2, "none"),
    ("pp2", GPT2, "none"),
    ("pp2+gpipe", LLAMA, "none"),
    ("pp2+interleaved", GPT2 | {"n_layers": 4}, "full"),
    ("dp2*zero2x2", LLAMA, "none"),
    ("dp2*tp2", GPT2, "none"),
    ("zero3x2*tp2+sp", LLAMA, "full"),
    ("pp2*tp2+sp", LLAMA, "full"),
    ("pp2*zero2x2", {}, "none"),
]


def train_as_all(tmp_path, dataset, layout, /, **sections):
    return rehearse(tmp_path, values_of(dataset, layout, **sections), parse_layout(layout).world_size)


@pytest.mark.parametrize(("layout", "model", "recompute"), LAYOUTS)
def test_a_layout_trains(tmp_path, data, layout, model, recompute):
    for job in train_as_all(tmp_path, data, layout, model=model, train={"recompute": recompute}):
        assert devices_of(job) == on(DEVICE)


@pytest.mark.parametrize("layout", ["zero1x1", "zero3x2"])
def test_offload_keeps_weights_gradients_and_moments_on_the_host(tmp_path, data, layout):
    for job in train_as_all(tmp_path, data, layout, parallel={"offload": True}):
        assert devices_of(job) == on(HOST)


@pytest.mark.parametrize("layout", ["1", "zero3x2*tp2+sp", "pp2"])
def test_inputs_of_recompute_in_host_memory(tmp_path, data, layout):
    train = {"recompute": "full", "recompute_offload": True}
    for job in train_as_all(tmp_path, data, layout, train=train):
        assert devices_of(job) == on(DEVICE)


@pytest.mark.parametrize("layout", ["1", "dp2", "zero3x2", "tp2", "pp2"])
def test_steps_that_are_judged_late(tmp_path, data, layout):
    for job in train_as_all(tmp_path, data, layout, guard={"late": True}, optimizer={"clip": 1e-3}):
        assert devices_of(job) == on(DEVICE)


def test_steps_that_are_judged_late_under_offload(tmp_path, data):
    sections = {"parallel": {"offload": True}, "guard": {"late": True}, "optimizer": {"clip": 1e-3}}
    for job in train_as_all(tmp_path, data, "zero1x1", **sections):
        assert devices_of(job) == on(HOST)


@pytest.mark.parametrize("layout", ["1", "tp2", "pp2"])
def test_documents_do_not_see_each_other(tmp_path, data, layout):
    for job in train_as_all(tmp_path, data, layout, data={"reset_documents": True}):
        assert devices_of(job) == on(DEVICE)


@pytest.mark.parametrize("layout", ["1", "dp2", "tp2", "zero2x2"])
def test_blocks_and_loss_are_compiled_for_the_gpu(tmp_path, data, layout):
    for job in train_as_all(tmp_path, data, layout, train={"compile": "on"}):
        assert expected_graphs(job) == {"scaled_dot_product_attention", "logsumexp"}  # and captured
        assert devices_of(job) == on(DEVICE)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["1", "zero3x2", "tp2+sp"])
def test_half_precision(tmp_path, data, layout, dtype):
    for job in train_as_all(tmp_path, data, layout, precision={"dtype": dtype, "reduce_dtype": "bf16"}):
        weights = job.model.named_weights().values()
        assert {weight.dtype for weight in weights} == {torch.float32}
        assert devices_of(job) == on(DEVICE)


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_other_optimisers(tmp_path, data, name):
    (job,) = train_as_all(tmp_path, data, "1", optimizer={"name": name})
    assert devices_of(job) == on(DEVICE)
