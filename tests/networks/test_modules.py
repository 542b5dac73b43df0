"""Described networks as PyTorch modules: their exact size, what goes in and comes out, initial weights."""

from importlib import resources

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shoal.config.sections import Model
from shoal.errors import ConfigError
from shoal.models.init import build_decoder, initialise
from shoal.models.shape import resolve_shape
from shoal.networks.description import names, parse, read
from shoal.networks.modules import Network

NORMED = """
input = [3, 8, 8]
classes = 4
[[layers]]
kind = "conv"
out = 6
kernel = 3
bias = false
[[layers]]
kind = "batch_norm"
[[layers]]
kind = "global_avg_pool"
[[layers]]
kind = "linear"
out = "classes"
"""


def on_meta(name, *sizes):
    with torch.device("meta"):
        return Network(read(name).resolve(*sizes))


@pytest.mark.parametrize("name", names())
def test_a_module_has_the_parameters_and_operations_of_its_description(name):
    network, resolved = on_meta(name), read(name).resolve()
    assert sum(weight.numel() for weight in network.parameters()) == resolved.num_parameters
    products = FlopCounterMode(display=False)
    inputs = torch.empty(2, *resolved.input, device="meta")
    with products:
        logits = network(inputs.long() if resolved.is_tokens else inputs)
    assert logits.shape == (2, *resolved.input * resolved.is_tokens, resolved.classes)
    if name != "lstm":  # torch counts nothing inside an LSTM
        assert products.get_total_flops() == 2 * 2 * resolved.multiply_adds
    assert network.flops_per_target == 6 * resolved.multiply_adds // resolved.targets
    assert len(network(**network.smallest_call(torch.device("meta")))) == (1 if resolved.is_tokens else 2)


def test_the_smallest_call_is_enough_for_a_normalisation_of_one_pixel():
    text = NORMED.replace("kernel = 3", "kernel = 8")
    network = Network(parse(text, "test").resolve())
    assert len(network.train()(**network.smallest_call(torch.device("cpu")))) == 2


@pytest.mark.parametrize("name", ["forward", "resolved", "training.x"])
def test_a_name_that_modules_have_for_something_else_is_rejected(name):
    text = NORMED.replace('kind = "conv"', f'kind = "conv"\nname = "{name}"')
    with pytest.raises(ConfigError, match=f"a layer cannot have the name {name.partition('.')[0]}"):
        Network(parse(text, "test").resolve())


def test_a_normalisation_may_have_the_name_bias():
    network = Network(parse(NORMED.replace('"batch_norm"', '"batch_norm"\nname = "bias"'), "test").resolve())
    initialise(network, 1)
    assert (network.get_parameter("bias.weight").min(), network.get_parameter("bias.bias").max()) == (1, 0)


def test_operations_are_six_for_each_number_of_a_matrix():
    assert on_meta("fcn-r").flops_per_target == 6 * 14_198_784
    assert on_meta("lstm").flops_per_target == 6 * (2 * 4 * 256 * 512 + 256 * 10_000)


def test_initial_weights_are_a_function_of_seed_and_name():
    torch.manual_seed(1)
    one, two, other = (Network(read("lstm").resolve((32,), ids)) for ids in (50, 70, 50))
    for network, seed in ((one, 3), (two, 3), (other, 4)):
        initialise(network, seed)
    assert torch.equal(one.lstm.weight_hh_l1, two.lstm.weight_hh_l1)
    assert torch.equal(one.embed.weight, two.embed.weight[:50])
    assert not torch.equal(one.lstm.weight_hh_l1, other.lstm.weight_hh_l1)
    assert not one.lstm.bias_ih_l0.any()
    network = Network(read("fcn-r").resolve((300,), 10))
    initialise(network, 3)
    first = network.get_submodule("hidden.0")
    assert first.weight.std().item() == pytest.approx(4 * (2 / 2348) ** 0.5, rel=0.01)
    assert network.head.weight.std().item() == pytest.approx((2 / 1034) ** 0.5, rel=0.05)


def test_described_gpt2_is_the_decoder_with_the_same_weights():
    text = resources.files("shoal.networks").joinpath("gpt2-s.toml").read_text()
    for given, small in (
        ("768", "32"),
        ("3072", "128"),
        ("heads = 12", "heads = 4"),
        ("times = 12", "times = 2"),
    ):
        text = text.replace(given, small)
    network = Network(parse(text, "test").resolve((16,), 100)).double()
    model = Model(n_layers=2, d_model=32, n_heads=4, max_seq_len=16)
    decoder = build_decoder(resolve_shape(model, 100), 1, "cpu").double()
    torch.manual_seed(0)
    for weight in decoder.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.1)  # biases and norms, too
    theirs = {name: weight.detach() for name, weight in decoder.named_parameters()}
    mine = {"embed.weight": theirs["embed.weight"][:100], "embed.positions": theirs["positions.weight"]}
    mine |= {"norm.weight": theirs["norm.weight"], "norm.bias": theirs["norm.bias"]}
    inside = {
        "0.body.0": "attention_norm",
        "1.body.0": "mlp_norm",
        "1.body.1": "mlp.up",
        "1.body.3": "mlp.down",
    }
    for block in range(2):
        for kind in ("weight", "bias"):
            of, to = f"blocks.{block}", f"blocks_{block}_"
            for ours, other in inside.items():
                mine[f"{to}{ours}.{kind}"] = theirs[f"{of}.{other}.{kind}"]
            qkv = [theirs[f"{of}.attention.{part}.{kind}"] for part in "qkv"]
            mine[f"{to}0.body.1.in_{kind}"] = torch.cat(qkv)
            mine[f"{to}0.body.1.out_{kind}"] = theirs[f"{of}.attention.o.{kind}"]
    network.load_state_dict(mine)
    ids = torch.randint(0, 100, (3, 16))
    torch.testing.assert_close(network(ids), decoder(ids)[..., :100], rtol=1e-5, atol=1e-5)


def test_convolutions_begin_as_he_and_others_have_it_and_statistics_as_before_training():
    with torch.device("meta"):
        network = Network(read("resnet-56").resolve())
    network.to_empty(device="cpu")
    initialise(network, 1)
    name = next(name for name, weight in network.named_parameters() if weight.shape == (64, 64, 3, 3))
    weight = network.get_parameter(name)
    assert weight.std().item() == pytest.approx((2 / 576) ** 0.5, rel=0.02)
    assert not torch.equal(weight[0, 0], weight[0, 1])
    statistics = network.running_statistics()
    assert {bool((tensor == float("var" in name)).all()) for name, tensor in statistics.items()} == {True}
    assert len(statistics) == 2 * 55


def test_running_statistics_follow_training_and_are_what_evaluation_uses():
    network = Network(parse(NORMED, "test").resolve())
    initialise(network, 1)
    torch.manual_seed(0)
    images = 5 + torch.randn(16, 3, 8, 8)
    network(images)
    mean, variance = network.running_statistics().values()  # those of the one normalisation
    x = network.get_submodule("0")(images)
    torch.testing.assert_close(mean, 0.1 * x.mean((0, 2, 3)))
    torch.testing.assert_close(variance, 0.9 + 0.1 * x.var((0, 2, 3)))
    before = network.eval()(images)
    mean += 1
    assert not torch.allclose(network(images), before)
