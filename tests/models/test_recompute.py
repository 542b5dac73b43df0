"""Recomputing activations changes nothing but the memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal import scoring
from shoal.models.init import build_decoder
from tests.cases import every
from tests.models.tiny import STYLES, tiny_shape, tokens

WAYS = pytest.mark.parametrize(("mode", "layers"), [("full", 1), ("full", 2), ("full", 5), ("selective", 1)])


def loss_and_gradients(model, mode="none", layers=1, dtype=torch.float32, *, offload=False, **inputs):
    model.set_recompute(mode, layers, offload=offload)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = scoring.loss_sum(model(tokens(), **inputs), tokens(seed=2))
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


def assert_equal(one, other):
    assert torch.equal(one[0], other[0])
    for name, gradient in one[1].items():
        assert torch.equal(gradient, other[1][name]), name


@STYLES
@WAYS
@pytest.mark.parametrize("dtype", every(2, [torch.bfloat16, torch.float32]))
def test_losses_and_gradients_are_bit_equal_with_dropout(style, mode, layers, dtype):
    shape = tiny_shape(style, n_layers=3, dropout=0.2, attention_dropout=0.2)
    model = build_decoder(shape, seed=1, device="cpu")
    keys = torch.tensor([5, 6, 7])
    plain = loss_and_gradients(model, dtype=dtype, dropout_keys_b=keys)
    for offload in (False, True):
        again = loss_and_gradients(model, mode, layers, dtype, offload=offload, dropout_keys_b=keys)
        assert_equal(plain, again)


@WAYS
def test_documents_stay_apart_when_attention_is_computed_again(mode, layers):
    model = build_decoder(tiny_shape("llama", n_kv_heads=2, n_layers=3), seed=1, device="cpu")
    documents = (torch.arange(16) // 5).expand(3, -1)
    plain = loss_and_gradients(model, documents_bt=documents)
    assert_equal(plain, loss_and_gradients(model, mode, layers, documents_bt=documents))
    assert not torch.equal(plain[0], loss_and_gradients(model)[0])


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside that are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = set()
        self.copied = 0  # tensors with values written into others

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        result = function(*args, **(kwargs or {}))
        # torch 2.11's checkpoint saves an empty tensor, too.
        self.copied += function is torch.ops.aten.copy_.default and args[1].numel() > 0
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf):
                self._count(leaf.untyped_storage(), given)
        return result

    def _count(self, storage, given):
        if storage._cdata in self._known or storage._cdata in given:
            return
        self._known.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key, size):
        self._known.discard(key)
        self.live -= size


def activations(mode, layers=1, *, offload=False):
    """Return what a forward pass keeps for the backward pass, the peak of both, and the tensors copied.

    Head and loss apart.
    """
    model = build_decoder(tiny_shape("gpt2", n_layers=6), seed=1, device="cpu")
    model.set_recompute(mode, layers, offload=offload)
    with LiveBytes() as memory:
        hidden = model.hidden(tokens(batch=16))
        kept, copied = memory.live, memory.copied
        hidden.sum().backward()
    return kept, memory.peak, copied


def test_full_keeps_a_tenth_and_halves_the_peak_and_selective_lies_between():
    kept, peak, _ = zip(*(activations(mode) for mode in ("none", "selective", "full")), strict=True)
    assert kept[2] < kept[1] < kept[0]
    assert kept[2] < 0.1 * kept[0]
    assert kept[1] < 0.7 * kept[0]
    assert peak[2] < 0.5 * peak[0]


def test_offload_copies_what_enters_each_chunk_and_keeps_nothing_else():
    (here, _, none), (there, _, copied) = (
        activations("full", 2, offload=offload) for offload in (False, True)
    )
    assert (none, copied) == (0, 3)
    assert there == here  # the copies in place of the inputs, which are freed


def test_the_count_of_bytes_is_what_autograd_saves():
    model = build_decoder(tiny_shape("gpt2", n_layers=6), seed=1, device="cpu")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden(tokens(batch=16)).sum()
    assert sum(size for size, _ in saved.values()) == pytest.approx(activations("none")[0], rel=0.02)
