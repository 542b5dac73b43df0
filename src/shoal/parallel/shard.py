"""ZeRO by torch's FSDP2: weights, gradients and optimiser state sharded over `dp_shard`.

| zero | gathered for forward | kept until | gradients summed to shards |
| --- | --- | --- | --- |
| 1 | once a step | the last backward | after the last micro-step |
| 2 | once a step | the last backward | after every micro-step |
| 3 | at every forward and backward | each block's end | after every micro-step |
"""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shoal.models.decoder import Decoder


class Sharding:
    """Shards decoders, or parts of one, and says in each micro-step what is to be exchanged."""

    def __init__(self, mesh: DeviceMesh, zero: int, reduce_dtype: torch.dtype, *, offload: bool) -> None:
        self._mesh = mesh
        self._zero = zero
        self._reduce_dtype = reduce_dtype
        self._offload = CPUOffloadPolicy() if offload else OffloadPolicy()

    def shard(self, model: Decoder) -> None:
        """Shard each block by itself, then all the rest. Weights may be on the meta device yet."""
        for module in (*model.blocks.values(), model):
            unit = fully_shard(
                module,
                mesh=self._mesh,
                reshard_after_forward=self._zero == 3,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=self._reduce_dtype),
                offload_policy=self._offload,
            )
            # The loss is divided once, by the global number of tokens; and gloo knows no scaled sums.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def micro_step(self, model: Decoder, *, last: bool) -> None:
        """Prepare the backward pass of one micro-step."""
        sharded = cast(FSDPModule, model)
        sharded.set_is_last_backward(last)
        sharded.set_requires_gradient_sync(last or self._zero > 1)
        sharded.set_reshard_after_backward(last or self._zero == 3)

    def give_back(self, model: Decoder) -> None:
        """Free what an evaluation has gathered."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
