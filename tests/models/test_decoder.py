from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from shoal.errors import ConfigError
from shoal.models import decoder
from shoal.models.counts import count_parameters
from shoal.models.decoder import Decoder
from shoal.models.init import build_decoder, initialise
from tests.models.hf import decoder_from_hf, random_gpt2, random_llama
from tests.models.tiny import STYLES, tiny_shape, tokens

HF_MODELS = {
    "gpt2": lambda: random_gpt2(),
    "gpt2 untied, odd vocabulary, own d_ff": lambda: random_gpt2(
        vocab_size=257, tie_word_embeddings=False, n_inner=100
    ),
    "gpt2, other eps": lambda: random_gpt2(layer_norm_epsilon=1e-3),
    "llama, grouped heads": lambda: random_llama(),
    "llama, one kv head, tied": lambda: random_llama(num_key_value_heads=1, tie_word_embeddings=True),
    "llama, all heads, other theta and eps": lambda: random_llama(
        num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-3,
    ),
}


@pytest.mark.parametrize("name", HF_MODELS)
def test_logits_and_gradients_equal_transformers(name):
    reference = HF_MODELS[name]()
    model = decoder_from_hf(reference)
    vocab_size = model.shape.vocab_size
    batch = tokens(vocab_size=vocab_size, time=32)
    ours, theirs = model(batch), reference(batch).logits
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours[..., :vocab_size], theirs, atol=5e-6, rtol=0)
    F.cross_entropy(ours[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    F.cross_entropy(theirs[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    ours_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    theirs_norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    torch.testing.assert_close(ours_norm, theirs_norm, atol=0, rtol=1e-5)


@STYLES
@pytest.mark.parametrize("tie", [True, False])
def test_padded_rows_take_no_probability_and_no_gradient(style, tie):
    model = build_decoder(tiny_shape(style, tie_embeddings=tie), seed=1, device="cpu")
    logits = model(tokens())
    assert logits.shape[-1] == 128
    assert torch.isneginf(logits[..., 50:]).all()
    assert torch.isfinite(logits[..., :50]).all()
    F.cross_entropy(logits.flatten(0, 1), tokens(seed=2).flatten()).backward()
    for weight in (model.head.weight, model.embed.weight):
        assert not weight.grad[50:].any()
        assert weight.grad[:50].abs().sum() > 0


@STYLES
def test_loss_does_not_depend_on_the_vocabulary_padding(style):
    losses = []
    for multiple in (1, 128):
        model = build_decoder(tiny_shape(style, pad_vocab_multiple=multiple), seed=1, device="cpu")
        losses.append(F.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=2).flatten()))
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=0)


@STYLES
def test_meta_build_is_right_after_to_empty_and_initialise(style):
    shape = tiny_shape(style)
    with torch.device("meta"):
        model = Decoder(shape)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    initialise(model, 3)
    built_here = Decoder(shape)
    initialise(built_here, 3)
    assert torch.equal(model(tokens()), built_here(tokens()))
    assert not list(model.buffers())


def test_tied_head_is_one_parameter_with_one_name_also_after_to_empty():
    with torch.device("meta"):
        model = Decoder(tiny_shape("gpt2"))
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = Decoder(tiny_shape("llama"))
    assert untied.head.weight is not untied.embed.weight


def test_learned_positions_refuse_a_longer_sequence():
    model = build_decoder(tiny_shape("gpt2"), seed=1, device="cpu")
    with pytest.raises(ConfigError, match=r"17 tokens does not fit model.max_seq_len = 16"):
        model(tokens(time=17))
    build_decoder(tiny_shape("llama"), seed=1, device="cpu")(tokens(time=17))


@STYLES
def test_a_token_sees_nothing_after_it(style):
    model = build_decoder(tiny_shape(style, n_kv_heads=2 if style == "llama" else 0), seed=1, device="cpu")
    changed = tokens().clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    difference = (model(tokens()) - model(changed)).nan_to_num().abs().amax(dim=(0, 2))
    assert difference[:9].max() < 1e-6
    assert difference[9:].min() > 1e-4


@STYLES
def test_counts_equal_the_built_parameters(style):
    for settings in (
        {},
        {"tie_embeddings": False},
        {"tie_embeddings": True, "d_ff": 77, "pad_vocab_multiple": 1},
    ):
        kv = {"n_kv_heads": 2} if style == "llama" else {}
        shape = tiny_shape(style, vocab_size=131, **settings | kv)
        counts = count_parameters(shape)
        parameters = list(Decoder(shape).parameters())
        assert counts.total == sum(p.numel() for p in parameters)
        assert counts.no_decay == sum(p.numel() for p in parameters if p.ndim == 1)


@STYLES
def test_dropout_in_the_model_is_a_function_of_the_keys(style):
    shape = tiny_shape(style, dropout=0.2, attention_dropout=0.2)
    model = build_decoder(shape, seed=1, device="cpu")
    keys = torch.tensor([11, 12, 13])
    together = model(tokens(), dropout_keys_b=keys)
    assert torch.equal(together, model(tokens(), dropout_keys_b=keys))
    one_by_one = [model(tokens()[row : row + 1], dropout_keys_b=keys[row : row + 1]) for row in range(3)]
    torch.testing.assert_close(together, torch.cat(one_by_one), atol=1e-6, rtol=0)
    assert (model(tokens(), dropout_keys_b=keys + 1) - together).nan_to_num().abs().max() > 0.01
    plain = build_decoder(tiny_shape(style), seed=1, device="cpu")
    assert torch.equal(model.eval()(tokens()), plain(tokens()))


def test_training_with_dropout_and_no_keys_is_a_mistake():
    model = build_decoder(tiny_shape("gpt2", dropout=0.1), seed=1, device="cpu")
    with pytest.raises(AssertionError, match="dropout_keys_b"):
        model(tokens())


def test_plain_attention_equals_the_fused_one():
    fused = decoder_from_hf(random_llama())
    plain = Decoder(dataclasses.replace(fused.shape, attention_dropout=1e-6))  # rounds to dropping nothing
    plain.load_state_dict(fused.state_dict())
    batch = tokens(time=32)
    torch.testing.assert_close(plain(batch, dropout_keys_b=torch.arange(3)), fused(batch), atol=5e-6, rtol=0)


def test_every_place_of_every_layer_has_its_own_masks(monkeypatch):
    seen = []
    monkeypatch.setattr(
        decoder, "keyed_dropout", lambda x, p, keys, site, part: seen.append((p, int(site))) or x
    )
    model = build_decoder(tiny_shape("gpt2", dropout=0.1, attention_dropout=0.2), seed=1, device="cpu")
    model(tokens(), dropout_keys_b=torch.arange(3))
    assert len({site for _, site in seen}) == len(seen) == 1 + 3 * 2
    assert sorted(p for p, _ in seen) == [0.1] * 5 + [0.2] * 2


def test_attention_dropout_averages_to_plain_attention():
    shape = tiny_shape("llama", n_kv_heads=2, n_layers=1, attention_dropout=0.5)
    model = build_decoder(shape, seed=1, device="cpu")
    batch = tokens(batch=1).expand(4000, -1)
    with torch.no_grad():
        block = model.blocks["0"]
        seen = []
        block.attention.register_forward_hook(lambda module, inputs, output: seen.append(output))
        model(batch, dropout_keys_b=torch.arange(4000))
        model.eval()(batch[:1])
    mean, plain = seen[0].mean(dim=0), seen[1][0]
    assert (mean - plain).norm() / plain.norm() < 0.05
    assert (seen[0][0] - plain).norm() / plain.norm() > 0.2


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, 0), (0.1, 2)])
def test_places_of_dropout_are_copied_to_the_device_once_and_only_where_something_is_dropped(
    dropout, expected, copies
):
    with torch.device("meta"):
        model = Decoder(tiny_shape("gpt2", dropout=dropout))
    tokens_bt, keys_b = (torch.zeros(shape, dtype=torch.long, device="meta") for shape in ((2, 8), 2))
    copies.clear()
    for _ in range(3):
        model(tokens_bt, dropout_keys_b=keys_b)
    assert len(copies) == expected, copies  # one a layer
