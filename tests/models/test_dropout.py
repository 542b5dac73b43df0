from __future__ import annotations

import math

import pytest
import torch

from shoal.models.dropout import keyed_dropout, site_id

SITE = site_id("blocks.0.mlp")


PINNED = [
    [1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0],
    [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1],
    [1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1],
]


def kept(keys, p=0.5, site=SITE, size=40_000):
    """Return the mask as float [samples, size]."""
    return (keyed_dropout(torch.ones(len(keys), size), p, torch.tensor(keys), site) > 0).float()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_lies_within_four_standard_errors(p):
    mask = kept(range(50), p)
    error = math.sqrt(p * (1 - p) / mask.numel())
    assert abs(mask.mean().item() - (1 - p)) < 4 * error + 1 / 65536
    rates = mask.mean(dim=1)
    assert abs(rates.std().item() / math.sqrt(p * (1 - p) / 40_000) - 1) < 0.5


def test_expectation_is_kept_and_gradient_is_the_mask():
    x = torch.full((40, 100, 96), 2.0, requires_grad=True)
    y = keyed_dropout(x, 0.3, torch.arange(40), SITE)
    assert abs(y.mean().item() - 2.0) < 0.01
    y.sum().backward()
    assert torch.equal(x.grad, y.detach() / 2)
    assert torch.unique(y).tolist() == pytest.approx([0.0, 2 / 0.7], rel=1e-4)


def test_bits_are_pinned_for_every_device_and_version():
    mask = kept([0, 1, -7], size=16)
    assert mask.int().tolist() == PINNED


def test_a_sample_keeps_its_mask_in_any_batch_and_an_odd_size_is_cut():
    keys = [5, 2**40 + 5, -5]
    together = kept(keys, size=1001)
    for row, key in enumerate(keys):
        assert torch.equal(together[row], kept([key], size=1001)[0])
    assert torch.equal(kept([5], size=1000), kept([5], size=1001)[:, :1000])


def test_masks_of_neighbouring_keys_and_sites_are_unrelated():
    keys = [*range(24), *(2**32 * n for n in range(1, 9))]
    masks = torch.cat([kept(keys), *(kept([1], site=site_id(f"blocks.{n}.mlp")) for n in range(1, 9))])
    correlation = torch.corrcoef(masks).fill_diagonal_(0)
    assert correlation.abs().max() < 5.5 / math.sqrt(40_000)


def test_no_key_is_a_shifted_copy_of_another():
    spectrum = torch.fft.rfft(kept(range(12)) - 0.5)
    for row in range(12):
        shifted = torch.fft.irfft(spectrum * spectrum[row].conj(), n=40_000) / (0.25 * 40_000)
        shifted[row, 0] = 0.0
        assert shifted.abs().max() < 6.5 / math.sqrt(40_000)


def test_rows_and_columns_of_one_mask_are_unrelated():
    mask = kept([3], size=512 * 512)[0].view(512, 512)
    for part in (mask, mask.T):
        assert torch.corrcoef(part).fill_diagonal_(0).abs().max() < 6 / math.sqrt(512)
        assert abs(part.mean(dim=1).std().item() / math.sqrt(0.25 / 512) - 1) < 0.15


def test_nothing_is_done_where_nothing_is_dropped():
    x = torch.ones(2, 3)
    assert keyed_dropout(x, 0.0, torch.tensor([1, 2]), SITE) is x


def test_bfloat16_scale_has_no_bias():
    x = torch.full((1, 200_000), 3.0, dtype=torch.bfloat16)
    survivors = keyed_dropout(x, 0.1, torch.tensor([1]), SITE)
    assert survivors.dtype == torch.bfloat16
    assert survivors.max().item() == pytest.approx(3 / 0.9, rel=2**-8)
