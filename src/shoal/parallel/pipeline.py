"""Pipeline parallelism with torch's schedules: ranks along `pp` hold successive parts of the model.

The schedules carry only the numbers of micro-batches. Every rank along `pp` holds the same micro-batches, and
parts send each other the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from shoal.models.decoder import Decoder

T = TypeVar("T")
RunPart = Callable[
    [nn.Module, T, Tensor | None], Tensor
]  # the last part returns the loss, the others the residual stream
Phase = Callable[[str], AbstractContextManager[Any]]

_SCHEDULES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
}


class Pipeline(Generic[T]):
    """Run micro-batches through the parts of a model."""

    def __init__(
        self,
        parts: Sequence[Decoder],
        numbers: Sequence[int],
        total: int,
        *,
        run_part: RunPart[T],
        before_backward: Callable[[Decoder, bool], None],
        phase: Phase,
        schedule: str,
        num_microbatches: int,
        boundary: torch.Size,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Take this rank's parts, of `total`, and their numbers; `boundary` is the shape between parts."""
        self._group = group
        self._boundary = boundary
        self._device = device
        self._total, self._numbers = total, numbers
        self._modules = [_PartModule(part, run_part, device) for part in parts]
        self._factor = 1.0
        stages = [
            _Stage(module, number, total, device, boundary, group, before_backward, phase)
            for module, number in zip(self._modules, numbers, strict=True)
        ]
        several = issubclass(_SCHEDULES[schedule], torch_schedules.PipelineScheduleMulti)
        self._schedule = _SCHEDULES[schedule](
            cast(Any, stages if several else stages[0]),
            num_microbatches,
            loss_fn=lambda loss, _: loss * self._factor,
            scale_grads=False,
        )

    def forward_backward(self, micro_batches: list[T], factor: float) -> Tensor:
        """Accumulate gradients of the summed loss times `factor`; return the sum, 0 except on the last part.

        Collective over pp.
        """
        self._factor = factor
        for module in self._modules:
            module.begin(micro_batches)
        index = torch.arange(len(micro_batches))  # on the host: reading one off a GPU waits for all its work
        first = (index,) if self._numbers[0] == 0 else ()
        self._schedule.step(*first, target=index, return_outputs=False, index=index)
        return sum((module.total for module in self._modules), torch.zeros((), device=self._device))

    @torch.no_grad()
    def evaluate(self, micro_batches: list[T], sizes: list[int]) -> list[Tensor]:
        """Return the summed loss of each micro-batch, on the last part only; `sizes` are their sequences.

        Collective over pp.
        """
        losses, sent = [], []
        for module, number in zip(self._modules, self._numbers, strict=True):
            module.begin(micro_batches)
            for place, size in enumerate(sizes):
                inputs = None
                if number > 0:
                    inputs = torch.empty((size, *self._boundary[1:]), device=self._device)
                    dist.recv(inputs, group=self._group, group_src=self._owner(number - 1))
                y = module(inputs, index=torch.tensor([place]))
                if number < self._total - 1:
                    peer = self._owner(number + 1)
                    sent.append((dist.isend(y, group=self._group, group_dst=peer), y))
                else:
                    losses.append(y)
        for work, _ in sent:
            assert work is not None, "this rank is not in the pipeline"
            work.wait()
        return losses

    def _owner(self, number: int) -> int:
        return number % dist.get_world_size(self._group)


class _PartModule(nn.Module, Generic[T]):
    """Part of a model for the schedules. It hides that the part may be sharded, which they would handle."""

    def __init__(self, part: Decoder, run_part: RunPart[T], device: torch.device) -> None:
        super().__init__()
        self.part = part
        self._run_part = run_part
        self._micro_batches: list[T] = []
        self._device = device
        self.total = torch.zeros((), device=device)

    def begin(self, micro_batches: list[T]) -> None:
        self._micro_batches = micro_batches
        self.total = torch.zeros((), device=self._device)

    def forward(self, x: Tensor | None = None, *, index: Tensor) -> Tensor:
        inputs = None if self.part.is_first else x
        y = self._run_part(self.part, self._micro_batches[int(index)], inputs)
        if self.part.is_last:
            self.total = self.total + y.detach()  # in evaluation not always of one size
        return y


class _Stage(PipelineStage):
    """Stage with known shapes, whose computation is timed.

    Overrides the two methods that every schedule calls for its computations, as seen on torch 2.11 to 2.13.
    """

    def __init__(
        self,
        module: _PartModule[Any],
        number: int,
        total: int,
        device: torch.device,
        boundary: torch.Size,
        group: dist.ProcessGroup,
        before_backward: Callable[[Decoder, bool], None],
        phase: Phase,
    ) -> None:
        index = torch.zeros(1, dtype=torch.long, device="meta")
        stream = torch.empty(boundary, device="meta", requires_grad=True)
        super().__init__(
            module,
            number,
            total,
            device,
            input_args=index if module.part.is_first else stream,
            output_args=torch.empty((), device="meta", requires_grad=True) if module.part.is_last else stream,
            group=group,
        )
        self._part = module.part
        self._before_backward = before_backward
        self._phase = phase

    def forward_one_chunk(self, *args: Any, **named: Any) -> Any:
        with self._phase("forward"):
            return super().forward_one_chunk(*args, **named)

    def backward_one_chunk(self, *args: Any, **named: Any) -> Any:
        self._before_backward(self._part, named.get("last_backward", False))
        with self._phase("backward"):
            return super().backward_one_chunk(*args, **named)

    def backward_weight_one_chunk(self, *args: Any, **named: Any) -> Any:
        with self._phase("backward"):
            return super().backward_weight_one_chunk(*args, **named)
