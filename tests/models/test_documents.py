"""Documents in one sequence see themselves alone."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from shoal.models.documents import attend, block_mask, dense_mask, document_ids, restarted_positions
from shoal.models.init import build_decoder
from tests.models.tiny import STYLES, tiny_shape, tokens
from tests.shared import SHARED

GOLDENS = SHARED / "data/megatron/goldens/masks.json"
EOD = 7


def rows(mask):
    return ["".join(str(int(seen)) for seen in row) for row in mask]


def test_one_end_of_document_in_the_middle():
    ids = document_ids(torch.tensor([[5, 3, EOD, 4, 2, 6]]), EOD)
    assert ids.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert restarted_positions(ids).tolist() == [[0, 1, 2, 0, 1, 2]]
    assert rows(dense_mask(ids)[0, 0]) == ["100000", "110000", "111000", "000100", "000110", "000111"]


@pytest.mark.skipif(not GOLDENS.is_file(), reason="needs the shared goldens, which are not there")
def test_masks_and_positions_are_megatrons():
    cases = json.loads(GOLDENS.read_text())["cases"]
    assert cases
    for case in cases:
        ids = document_ids(torch.tensor(case["inputs"]["tokens"]), case["inputs"]["eod_token"])
        both = next(r for r in case["results"] if r["reset_position_ids"] and r["reset_attention_mask"])
        assert restarted_positions(ids).tolist() == both["position_ids"], case["note"]
        assert [rows(mask) for mask in dense_mask(ids)[:, 0]] == both["attention_mask"], case["note"]


@STYLES
@pytest.mark.parametrize("attention_dropout", [0.0, 1e-6])  # the second drops nothing, by plain attention
def test_packed_documents_have_the_logits_of_separate_ones(style, attention_dropout):
    shape = tiny_shape(
        style,
        n_kv_heads=2 if style == "llama" else 0,
        attention_dropout=attention_dropout,
    )
    model = build_decoder(shape, seed=1, device="cpu")
    keys = torch.tensor([1]) if attention_dropout else None
    packed = tokens(batch=1)
    packed[packed == EOD] = 0
    packed[0, [0, 4, 10]] = EOD
    parts = packed.split([1, 4, 6, 5], dim=1)
    together = model(packed, documents_bt=document_ids(packed, EOD), dropout_keys_b=keys)
    apart = torch.cat([model(part, dropout_keys_b=keys) for part in parts], dim=1)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)
    assert (model(packed, dropout_keys_b=keys) - apart).nan_to_num().abs().max() > 1e-2


def many_documents(time):
    generator = torch.Generator().manual_seed(3)
    stream = torch.randint(0, 100, (2, time), generator=generator)
    stream[0, 5:300] = 0  # a document of more than two tiles
    return document_ids(stream, EOD)


@pytest.mark.parametrize("time", [100, 512, 700])
def test_tiles_cover_what_is_seen_and_full_ones_are_seen_throughout(time):
    ids = many_documents(time)
    mask = block_mask(ids)
    padded = F.pad(dense_mask(ids).int(), (0, -time % 128, 0, -time % 128))
    tiles = padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    assert torch.equal(mask.to_dense().bool(), tiles.amax(dim=(3, 5)).bool())
    full = torch.zeros_like(mask.to_dense())
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(full.shape[2])):
        batch, row = index.tolist()
        chosen = mask.full_kv_indices[batch, 0, row, : mask.full_kv_num_blocks[batch, 0, row]]
        full[batch, 0, row, chosen.long()] = 1
    assert torch.equal(full.bool(), tiles.amin(dim=(3, 5)).bool())
    assert time == 100 or full.any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as meant here
def test_attention_under_tiles_is_attention_under_the_mask():
    ids = many_documents(300)
    q, k, v = torch.randn(3, 2, 4, 300, 16, generator=torch.Generator().manual_seed(1))
    k, v = k[:, :2], v[:, :2]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(ids), enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, block_mask(ids)), expected, atol=1e-5, rtol=0)
