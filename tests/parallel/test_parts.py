"""What a rank holds of a model that is cut by tensors or layers: parameters, and activations in flight."""

import gc
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from shoal.config.layout import parse_layout, settings_of
from shoal.config.sections import Model
from shoal.models.decoder import Decoder
from shoal.models.shape import resolve_shape
from shoal.parallel.tensor import Axis, TensorParallel, own_part
from shoal.runtime.mesh import local
from shoal.train.step import forward_backward
from tests.train.ranks import make_job, tiny_config

GPT2_MEDIUM = {"n_layers": 24, "d_model": 1024, "n_heads": 16, "max_seq_len": 1024}


def parts_on_meta(settings, vocab_size):
    """Cut a model without memory along tp; return the elements of each weight that this rank has."""
    shape = resolve_shape(Model(**settings), vocab_size)
    with torch.device("meta"):
        model = Decoder(shape)
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        TensorParallel(Axis(mesh["tp"], lambda _: nullcontext()), sequence=False).cut(model)
    return {name: own_part(weight)[0].numel() for name, weight in model.named_weights().items()}


@pytest.mark.parametrize(
    ("tp", "multiple", "parameters"), [(1, 128, 354_871_296), (2, 256, 178_100_224), (1, 1, 354_823_168)]
)
def test_a_rank_has_as_many_parameters_as_megatron_printed(pool, tp, multiple, parameters):
    """Printed by Megatron-LM's runs of GPT-2 medium, 50,257 tokens padded to a multiple, 2021."""
    settings = GPT2_MEDIUM | {"pad_vocab_multiple": multiple}
    for part in pool.run(parts_on_meta, tp, settings, 50257):
        assert sum(part.values()) == parameters


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_two_tensor_ranks_have_half_of_every_matrix_each(pool, style):
    settings = GPT2_MEDIUM | {"style": style, "d_ff": 4096}
    (whole,) = pool.run(parts_on_meta, 1, settings, 50257)
    for part in pool.run(parts_on_meta, 2, settings, 50257):
        for name, elements in whole.items():
            is_matrix = name.endswith("weight") and "norm" not in name and not name.startswith("positions")
            assert not is_matrix or part[name] * 2 == elements, name


class Kept:
    """Counts the bytes that the graphs now alive keep for their backward passes, weights left out."""

    def __init__(self, weights):
        self.now = self.most = 0
        self.weights = {local(weight).untyped_storage().data_ptr() for weight in weights}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor):
        is_weight = tensor.untyped_storage().data_ptr() in self.weights
        return _Saved(tensor, self, 0 if is_weight else tensor.nbytes)


class _Saved:
    """A saved tensor, as long as its graph lives."""

    def __init__(self, tensor, kept, size):
        self.tensor, self.kept, self.size = tensor, kept, size
        kept.now += size
        kept.most = max(kept.most, kept.now)

    def __del__(self):
        self.kept.now -= self.size


def most_kept(run_dir, values):
    """Run a step; return the most bytes that this rank kept at once."""
    job = make_job(run_dir, values)
    kept = Kept(job.model.named_weights().values())
    with kept.hooks:
        forward_backward(job, job.task.batch(1))
    gc.collect()
    assert kept.now == 0
    return kept.most


@pytest.mark.parametrize("stages", [2, 4])
def test_1f1b_keeps_activations_of_as_many_micro_batches_as_there_are_stages_to_come(
    pool, data, tmp_path, stages
):
    """GPipe keeps those of all of them, here 8."""

    def run(words):
        values = tiny_config(
            data,
            model={"n_layers": 4, "n_heads": 4},
            train={"micro_batch_size": 2},
            parallel=settings_of(parse_layout(words)),
        )
        return pool.run(most_kept, stages, tmp_path / words, values)

    everything, few = run(f"pp{stages}+gpipe"), run(f"pp{stages}")
    for rank in range(stages):
        assert few[rank] * 8 == pytest.approx(everything[rank] * (stages - rank), rel=0.01)


def sums_under_way(run_dir, values):
    """Return how many reduce-scatters nobody has waited for, after the backward passes and at their end."""
    job = make_job(run_dir, values)
    scatter = job.model.sharding._scatter
    batch = job.task.batch(1)
    job.model.forward_backward(job.task.micro_batches(batch), 1 / batch.global_targets)
    seen = [len(scatter._in_flight)]
    job.model.finish_gradients()
    return [*seen, len(scatter._in_flight)]


@pytest.mark.parametrize(
    ("words", "steps", "late"), [("zero1x2", 2, 2), ("zero2x2", 1, 2), ("zero2x2", 2, 0)]
)
def test_a_backward_pass_on_cpus_does_not_wait_for_the_sums_it_only_keeps(
    pool, data, tmp_path, words, steps, late
):
    """Two at the most, as each holds a block's gradients; those that are added to others are waited for."""
    values = tiny_config(data, train={"micro_batch_size": 16 // (2 * steps), "global_batch_size": 16})
    values["parallel"] = settings_of(parse_layout(words))
    for rank in pool.run(sums_under_way, 2, tmp_path, values):
        assert rank == [late, 0]


def gathers_begun(run_dir, values):
    """Return how many modules' weights are gathered before the forward pass begins."""
    job = make_job(run_dir, values)
    with mock.patch.object(FSDPModule, "unshard") as begun:
        job.model.sharding.gather_ahead(job.model.decoders[0])
    return begun.call_count


@pytest.mark.parametrize(("words", "begun"), [("zero1x2", 3), ("zero2x2", 3), ("zero3x2", 0)])
def test_weights_that_are_given_back_after_the_forward_pass_are_not_gathered_ahead(
    pool, data, tmp_path, words, begun
):
    """All of them in memory at once is what ZeRO-3 is there to avoid."""
    values = tiny_config(data, parallel=settings_of(parse_layout(words)))
    assert pool.run(gathers_begun, 2, tmp_path, values) == [begun, begun]
