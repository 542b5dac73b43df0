"""Activations that the backward pass computes again instead of keeping them.

torch's checkpoint is called inside the model's own forward, so no wrapper changes a module's name. No
generator state is kept for it: dropout is a function of its keys and repeats by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]  # what F.linear comes down to


def run_in_chunks(
    blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor, layers: int, *, offload: bool = False
) -> Tensor:
    """Apply the blocks in turn and keep only what enters each chunk of `layers`; 0 keeps everything.

    `offload` keeps it in host memory, page-locked where there is a GPU. Inside of a chunk torch's checkpoint
    has hooks of its own, so that nothing else is copied.
    """
    if not layers:
        return _run(blocks, x)
    for first in range(0, len(blocks), layers):
        chunk = blocks[first : first + layers]
        with save_on_cpu(pin_memory=True) if offload else nullcontext():
            x = cast(Tensor, checkpoint(_run, chunk, x, use_reentrant=False, preserve_rng_state=False))
    return x


def keeping_products(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call `function` and keep its inputs and the results of its linear layers only."""
    contexts = partial(create_selective_checkpoint_contexts, _PRODUCTS)
    result = checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    return cast(Tensor, result)


def _run(blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x
