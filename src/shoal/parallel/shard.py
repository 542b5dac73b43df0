"""ZeRO with torch's FSDP2: weights, gradients and optimiser state sharded over `dp_shard`.

| zero | weights gathered | kept until | gradients reduced to shards |
| --- | --- | --- | --- |
| 1 | once a step | the last backward pass | after the last micro-batch |
| 2 | once a step | the last backward pass | after every micro-batch |
| 3 | in every forward and backward pass | the end of each block | after every micro-batch |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
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
    """Shard decoders, or parts of one, and control what is exchanged for each micro-batch."""

    def __init__(
        self,
        mesh: DeviceMesh,
        zero: int,
        reduce_dtype: torch.dtype,
        *,
        offload: bool,
        phase: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self._mesh = mesh
        self._zero = zero
        self._reduce_dtype = reduce_dtype
        self._offload = CPUOffloadPolicy() if offload else OffloadPolicy()
        self._on_cpu = mesh.device_type == "cpu"
        self._phase = phase
        self._scatter = LateReduceScatter(phase)
        self._begun: set[Decoder] = set()  # parts that had a backward pass in this step

    def shard(self, model: Decoder) -> None:
        """Shard each block, then the other modules. Weights may still be on the meta device."""
        for module in (*model.blocks.values(), model):
            unit = fully_shard(
                module,
                mesh=self._mesh,
                reshard_after_forward=self._zero == 3,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=self._reduce_dtype),
                offload_policy=self._offload,
            )
            # The loss is divided once, by the global number of tokens; gloo does not support scaled sums.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if self._on_cpu:  # the base classes of these two are private
                unit.set_custom_reduce_scatter(cast(Any, self._scatter))
                unit.set_custom_all_gather(cast(Any, TimedAllGather(self._phase)))

    def gather_ahead(self, model: Decoder) -> None:
        """Start to gather all weights that are kept until the last backward pass, so that blocks do not wait.

        For CPUs, where each block would otherwise wait for the other ranks. A GPU gathers in streams.
        """
        if self._on_cpu and self._zero < 3:
            for module in (model, *model.blocks.values()):
                cast(FSDPModule, module).unshard(async_op=True)

    def finish(self) -> None:
        """Wait until all gradients of the step are summed."""
        self._scatter.wait()
        self._begun.clear()

    def micro_step(self, model: Decoder, *, last: bool) -> None:
        """Prepare the backward pass of one micro-batch."""
        self._scatter.wait()
        sharded = cast(FSDPModule, model)
        # A sum that is added to earlier ones is needed now; one that becomes the gradient can come later.
        first_sums = self._zero == 1 or model not in self._begun
        self._begun.add(model)
        self._scatter.late = first_sums and self._reduce_dtype == torch.float32
        sharded.set_is_last_backward(last)
        sharded.set_requires_gradient_sync(last or self._zero > 1)
        sharded.set_reshard_after_backward(last or self._zero == 3)

    def give_back(self, model: Decoder) -> None:
        """Free the weights that an evaluation has gathered."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _Allocating:
    """Allocation of output tensors, which FSDP2 requires of a custom collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TimedAllGather(_Allocating):
    """FSDP2's all-gather on a CPU, whose waiting time counts as the phase "shard"."""

    def __init__(self, phase: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._phase = phase

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
        with self._phase("shard"):
            work = gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return _TimedWork(work, self._phase) if work is not None else None


class _TimedWork(dist.Work):
    """Collective in flight; waiting for it is timed."""

    def __init__(self, work: dist.Work, phase: Callable[[str], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._work = work
        self._phase = phase

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._phase("shard"):
            return bool(self._work.wait(timeout))


class LateReduceScatter(_Allocating):
    """FSDP2's reduce-scatter on a CPU, for which the backward pass does not wait.

    torch waits for that of each block, so that ranks of different speed wait for each other at every block.
    """

    _MAX_IN_FLIGHT = 2  # each keeps the whole gradients of a block

    def __init__(self, phase: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.late = False
        self._phase = phase
        self._in_flight: list[tuple[dist.Work, Tensor]] = []

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # until 2.12
        work = scatter(output_tensor, input_tensor, group=group, op=op, async_op=True)
        self._in_flight.append((work, input_tensor))
        with self._phase("shard"):
            self.wait(self._MAX_IN_FLIGHT if self.late else 0)

    def wait(self, left: int = 0) -> None:
        """Wait until at most this many are in flight."""
        while len(self._in_flight) > left:
            work, _ = self._in_flight.pop(0)
            work.wait()
