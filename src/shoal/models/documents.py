"""Several documents in one sequence that do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_BLOCK = 128  # flex_attention's default tile


def document_ids(tokens_bt: Tensor, eod_id: int) -> Tensor:
    """Number the document of each token, from 0 in each row; an end-of-document token ends its own."""
    ends_bt = (tokens_bt == eod_id).long()
    return ends_bt.cumsum(dim=1) - ends_bt


def restarted_positions(documents_bt: Tensor) -> Tensor:
    """Return the place of each token in its document, or in the part of it that the row begins with."""
    places_t = torch.arange(documents_bt.shape[1], device=documents_bt.device)
    begins_bt = F.pad(documents_bt[:, 1:] != documents_bt[:, :-1], (1, 0), value=True)
    return places_t - (places_t * begins_bt).cummax(dim=1).values


def dense_mask(documents_bt: Tensor) -> Tensor:
    """Return which columns a token sees, bool [batch, 1, time, time]: of its document, up to itself."""
    same_btt = documents_bt[:, :, None] == documents_bt[:, None, :]
    return same_btt.tril()[:, None]


def block_mask(documents_bt: Tensor) -> BlockMask:
    """Return the same as `dense_mask` in tiles of 128 x 128, without ever making it.

    As documents never fall along a row, two tiles on or below the diagonal share one where the last of the
    columns is not before the first of the rows; all of a tile is seen where both are one document.
    """
    time = documents_bt.shape[1]
    place = torch.arange(0, time, _BLOCK, device=documents_bt.device)
    first_bn, last_bn = documents_bt[:, place], documents_bt[:, (place + _BLOCK - 1).clamp(max=time - 1)]
    rows_n1, columns_n = place[:, None], place
    seen_bnn = (last_bn[:, None, :] >= first_bn[:, :, None]) & (columns_n <= rows_n1)
    full_bnn = (first_bn[:, None, :] == last_bn[:, :, None]) & (columns_n < rows_n1)

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (documents_bt[batch, row] == documents_bt[batch, column]) & (row >= column)

    return BlockMask.from_kv_blocks(
        *_listed(seen_bnn & ~full_bnn),
        *_listed(full_bnn),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(time, time),
    )


def attend(q_bhtc: Tensor, k_bhtc: Tensor, v_bhtc: Tensor, mask: BlockMask) -> Tensor:
    """Attend under a block mask, in a kernel made by the compiler on CUDA; else in plain steps."""
    fused = q_bhtc.is_cuda and not torch.compiler.is_compiling()
    kernel = _compiled() if fused else cast(Callable[..., Tensor], flex_attention)
    grouped = q_bhtc.shape[1] != k_bhtc.shape[1]
    return kernel(q_bhtc, k_bhtc, v_bhtc, block_mask=mask, enable_gqa=grouped)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _listed(chosen_bnn: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each row of tiles, how many are chosen, and all tiles with those first, as flex asks."""
    chosen_b1nn = chosen_bnn[:, None].int()
    order = chosen_b1nn.argsort(dim=-1, descending=True, stable=True)
    return chosen_b1nn.sum(dim=-1, dtype=torch.int32), order.int()
