"""Activations that the backward pass computes again instead of keeping them.

torch's checkpoint is called inside the model's own forward, so no wrapper changes a module's name. No
generator state is kept for it: dropout is a function of its keys and repeats by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]  # what F.linear comes down to


def run_in_chunks(blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor, layers: int) -> Tensor:
    """Apply the blocks in turn and keep only what enters each chunk of `layers`; 0 keeps everything."""
    if not layers:
        return _run(blocks, x)
    for first in range(0, len(blocks), layers):
        chunk = blocks[first : first + layers]
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
