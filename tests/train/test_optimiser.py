"""AdamW of weights that are cut: torch's own update, on each rank's part."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shoal.config.sections import Optimizer
from shoal.runtime.mesh import local
from shoal.train import optimiser

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def train_cut():
    """Take steps with both optimisers; return what is equal, how the state is cut, what was updated."""
    mesh, generator = init_device_mesh("cpu", (dist.get_world_size(),)), torch.Generator().manual_seed(1)
    values = [{n: torch.randn(5, 3, generator=generator) for n in PLACEMENTS} for _ in range(4)]

    def cut(tensors):
        return {n: distribute_tensor(tensors[n].clone(), mesh, [at]) for n, at in PLACEMENTS.items()}

    ours, theirs = ({n: nn.Parameter(t) for n, t in cut(values[0]).items()} for _ in range(2))
    reference = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    own, updated = optimiser.build_optimiser(ours, Optimizer(beta2=0.95, weight_decay=0.1)), set()
    update = torch._fused_adamw_

    def watched(*lists, **settings):
        updated.update(type(tensor) for tensors in lists for tensor in tensors)
        update(*lists, **settings)

    for gradients in values[1:]:
        for weights in (ours, theirs):
            for name, gradient in cut(gradients).items():
                weights[name].grad = gradient
        reference.step()
        with mock.patch.object(torch, "_fused_adamw_", watched):
            own.step(0.01)
    expected = {f"{n}.{key}": t for n, p in theirs.items() for key, t in reference.state[p].items()}
    expected |= {n: theirs[n] for n in ours}
    found = ours | optimiser.optimiser_tensors(ours, own)
    equal = {n: torch.equal(local(found[n]), local(tensor)) for n, tensor in expected.items()}
    return equal, {n: getattr(tensor, "placements", None) for n, tensor in found.items()}, updated


@pytest.mark.parametrize("ranks", [1, 2])
def test_adamw_updates_its_part_of_each_tensor_bit_for_bit_as_torch_does(pool, ranks):
    for equal, cuts, updated in pool.run(train_cut, ranks):
        assert len(equal) == 12
        assert all(equal.values()), equal
        for name, at in PLACEMENTS.items():
            assert {cuts[name], cuts[f"{name}.exp_avg"], cuts[f"{name}.exp_avg_sq"]} == {(at,)}
        assert updated
        assert DTensor not in updated
