from __future__ import annotations

import torch

from shoal.config.sections import Model
from shoal.models.init import build_decoder
from shoal.models.shape import resolve_shape


def build(vocab_size: int = 300, seed: int = 5, **settings):
    shape = {"n_layers": 4, "d_model": 96, "n_heads": 4, "max_seq_len": 40}
    return build_decoder(resolve_shape(Model(**shape | settings), vocab_size), seed, "cpu")


def test_weights_have_the_stated_spread():
    model = build(style="gpt2")
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert torch.all(weight == (0.0 if name.endswith("bias") else 1.0)), name
        else:
            residual = name.endswith((".o.weight", ".down.weight"))
            expected = 0.02 / 8**0.5 if residual else 0.02
            used = weight[: model.rows_in_use(name)]
            assert abs(used.std().item() / expected - 1) < 0.05, name
            assert abs(weight.mean().item()) < 0.001, name


def test_weights_depend_on_the_seed_and_the_name():
    model = build(style="llama")
    assert torch.equal(model.head.weight, build(style="llama").head.weight)
    assert not torch.equal(model.head.weight, build(style="llama", seed=6).head.weight)
    drawn = [weight.flatten()[:64] for weight in model.parameters() if weight.ndim == 2]
    similar = torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0)
    assert similar.abs().max() < 0.7


def test_another_depth_or_padding_leaves_a_tensor_as_it_was():
    odd = {"vocab_size": 301, "d_model": 36}  # torch draws the tail of a size not divisible by 16 differently
    model = build(**odd, pad_vocab_multiple=1)
    padded = build(**odd, pad_vocab_multiple=128)
    assert padded.embed.weight.shape[0] == 384
    assert torch.equal(model.embed.weight, padded.embed.weight[:301])
    assert not padded.embed.weight[301:].any()
    deeper = build(**odd, n_layers=6)
    assert torch.equal(model.blocks["3"].attention.q.weight, deeper.blocks["3"].attention.q.weight)
