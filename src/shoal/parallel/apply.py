"""The one place where a model is materialised and wrapped for several ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.config.sections import Config
from shoal.gradsync.allreduce import AllReduce
from shoal.models.decoder import Decoder
from shoal.parallel.compile import Compilation, compile_blocks
from shoal.runtime.process import Process


class Replicated:
    """A model as the trainer sees it: `bare` holds the parameters, `forward` is what runs."""

    def __init__(self, bare: Decoder, forward: nn.Module, sync: AllReduce) -> None:
        self.bare = bare
        self.forward = forward
        self.sync = sync

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-step; gradients travel on the last one only."""
        if last or not isinstance(self.forward, DistributedDataParallel):
            return nullcontext()
        return self.forward.no_sync()


_REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def apply(model: Decoder, process: Process, config: Config, compilation: Compilation) -> Replicated:
    """Wrap a materialised model: recompute, compile, replicate. Collective over the world.

    In this order, as the compiler is to see what is recomputed, and replicas what is compiled.
    """
    model.set_recompute(config.train.recompute, config.train.recompute_layers)
    if compilation.on:
        compile_blocks(model)
    sync = AllReduce(_REDUCE_DTYPES[config.precision.reduce_dtype])
    if process.world_size == 1:
        return Replicated(model, model, sync)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[process.device.torch_device] if process.device.is_cuda else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank computed the same weights
    )
    sync.attach(wrapped)
    # Compiled code would be made for this one token, too.
    with torch.compiler.set_stance("force_eager") if compilation.on else nullcontext():
        _settle_buckets(wrapped, sync, process.device.torch_device)
    return Replicated(model, wrapped, sync)


def _settle_buckets(wrapped: DistributedDataParallel, sync: AllReduce, device: torch.device) -> None:
    """Run one tiny backward, after which DDP orders its buckets for good.

    DDP regroups its buckets once, after the first backward. Left to the first real step, that would make the
    order of additions, and so the last bits of the result, depend on the step a process started at.
    """
    wrapped(
        torch.zeros(1, 1, dtype=torch.long, device=device),
        dropout_keys_b=torch.zeros(1, dtype=torch.long, device=device),
    )[..., :1].sum().backward()
    sync.wait()
    wrapped.zero_grad(set_to_none=True)
