"""Initial weights as a function of (seed, parameter name), so that every layout starts from the same ones."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from shoal.models.decoder import Decoder
from shoal.models.shape import ModelShape

_STD = 0.02  # GPT-2
_BLOCK_ROWS = 128  # rows drawn by one generator: bounds memory, and lets a rank draw only the rows it owns


def build_decoder(shape: ModelShape, seed: int, device: torch.device | str) -> Decoder:
    """Make a decoder on `device` with the initial weights of `seed`, without allocating it twice."""
    with torch.device("meta"):
        model = Decoder(shape)
    model.to_empty(device=device)
    initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Set all weights: matrices N(0, 0.02), residual outputs N(0, 0.02 / sqrt(2 layers)), biases 0, norms 1.

    A value depends on seed, parameter name and its place only: not on the device, the other parameters or the
    number of rows, so a padded vocabulary has the same true rows.
    """
    residual_std = _STD / (2 * model.shape.n_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
            _fill_normal(parameter, residual_std if residual else _STD, seed, name)


def _fill_normal(matrix: Tensor, std: float, seed: int, name: str) -> None:
    rows, columns = matrix.shape
    for block, first in enumerate(range(0, rows, _BLOCK_ROWS)):
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        # Always a whole block: torch draws the last values of a tensor differently, depending on its size.
        values = torch.randn(_BLOCK_ROWS, columns, generator=generator)
        part = matrix[first : first + _BLOCK_ROWS]
        part.copy_(values[: len(part)] * std)
