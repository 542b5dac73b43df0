"""Initial weights as a function of (seed, parameter name), so that every layout starts from the same ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.models.decoder import Decoder
from shoal.models.part import Part
from shoal.models.shape import ModelShape

_BLOCK_ROWS = 128  # rows drawn by one generator: bounds memory, and lets a rank draw only the rows it owns


def build_decoder(shape: ModelShape, seed: int, device: torch.device | str) -> Decoder:
    """Make a decoder on `device` with the initial weights of `seed`, without allocating it twice."""
    with torch.device("meta"):
        model = Decoder(shape)
    model.to_empty(device=device)
    initialise(model, seed)
    return model


def whole(parameter: Tensor) -> tuple[Tensor, int, int]:
    """Return a parameter that is not cut, and its first row and column."""
    return parameter, 0, 0


@torch.no_grad()
def initialise(model: Part, seed: int, own_part: Callable[[Tensor], tuple[Tensor, int, int]] = whole) -> None:
    """Set all weights: matrices N(0, the model's deviation for each), biases 0, norms 1, padded rows 0.

    A value depends on seed, parameter name and its place only: not on the device, the other parameters or the
    number of rows, so a padded vocabulary has the same true rows. `own_part` returns what of a parameter is
    to be set here, and the row and column of the whole where that begins.
    """
    for name, parameter in model.named_weights().items():
        part, row, column = own_part(parameter)
        if parameter.ndim == 1:
            part.fill_(0.0 if "bias" in name.rpartition(".")[2] else 1.0)
        else:
            columns = math.prod(parameter.shape[1:])  # a convolution's are its inputs and kernel
            _fill_normal(part.flatten(1), row, column, columns, model.initial_std(name), f"{seed}/{name}")
            if (rows := model.rows_in_use(name)) is not None:
                part[max(0, rows - row) :] = 0.0


def _fill_normal(part: Tensor, row: int, column: int, columns: int, std: float, name: str) -> None:
    """Fill the part of a matrix of `columns` columns that begins at (row, column)."""
    filled = 0
    while filled < len(part):
        block, skipped = divmod(row + filled, _BLOCK_ROWS)
        digest = hashlib.blake2b(f"{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        # Always a whole block: torch draws the last values of a tensor differently, depending on its size.
        values = torch.randn(_BLOCK_ROWS, columns, generator=generator)
        values = values[skipped : skipped + len(part) - filled, column : column + part.shape[1]]
        part[filled : filled + len(values)].copy_(values * std)
        filled += len(values)
