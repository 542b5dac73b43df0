from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shoal.models import loss
from shoal.models.loss import CrossEntropy, row_losses


def make(dtype=torch.float32, rows=37):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(rows, 60, generator=generator) * 5).to(dtype)
    logits[:, 50:] = float("-inf")
    return logits.requires_grad_(), torch.randint(0, 50, (rows,), generator=generator)


def both(logits, targets):
    """Return (loss, gradient) of ours and of torch's in fp64, for a loss divided by 7."""
    results = []
    for function, given in ((CrossEntropy(), logits), (_reference, logits.detach().double())):
        given.requires_grad_()
        value = function(given, targets)
        (value / 7).backward()
        results.append((value, given.grad))
    return results


def _reference(logits, targets):
    return F.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 60 * 5, 1 << 20])
def test_loss_and_gradient_equal_torch_whatever_the_chunk(monkeypatch, chunk):
    monkeypatch.setitem(loss._CHUNK_ELEMENTS, "cpu", chunk)
    (ours, ours_grad), (theirs, theirs_grad) = both(*make())
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours_grad.double(), theirs_grad, rtol=0, atol=1e-7)


def test_padded_columns_get_no_gradient_at_all():
    (_, grad), _ = both(*make())
    assert not grad[:, 50:].any()


def test_bfloat16_logits_give_an_fp32_loss_and_a_bfloat16_gradient():
    (ours, ours_grad), (theirs, theirs_grad) = both(*make(torch.bfloat16))
    assert (ours.dtype, ours_grad.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours_grad.double(), theirs_grad, rtol=2**-8, atol=1e-7)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], requires_grad=True)
    value = CrossEntropy()(logits, torch.tensor([0, 0]))
    value.backward()
    assert value.item() == 2e4
    assert torch.isfinite(logits.grad).all()


def test_empty_batches_give_zero():
    assert CrossEntropy()(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).item() == 0.0


def test_losses_of_rows_and_which_targets_are_the_likeliest():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(70, 40_000, generator=generator)
    logits[:, 39_990:] = float("-inf")  # padding
    targets = torch.where(torch.arange(70) % 3 == 0, logits.argmax(dim=1), 7)
    logits[5] = 1.0  # all alike: the first of them is the likeliest
    logits[8, 7] = logits[8].max()
    losses, likeliest = row_losses(logits, targets)
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(losses.double(), expected, atol=2e-6, rtol=0)
    assert likeliest.tolist() == (logits.argmax(dim=1) == targets).tolist()
    assert 24 <= likeliest.sum() <= 26
