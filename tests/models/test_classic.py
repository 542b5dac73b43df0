"""Classic networks: their exact size, what goes in and comes out, and where they begin."""

import pytest
import torch

from shoal.models.classic import FullyConnected, Lstm
from shoal.models.init import initialise

NETWORKS = {"fcn-r": lambda: FullyConnected(784, 10), "lstm": lambda: Lstm(10_000)}


def on_meta(name):
    with torch.device("meta"):
        return NETWORKS[name]()


@pytest.mark.parametrize(("name", "count"), [("fcn-r", 14_205_962), ("lstm", 6_182_672)])
def test_networks_have_the_parameters_of_the_literature(name, count):
    assert sum(weight.numel() for weight in on_meta(name).parameters()) == count


def test_operations_are_six_for_each_number_of_a_matrix():
    assert on_meta("fcn-r").flops_per_target == 6 * 14_198_784
    assert on_meta("lstm").flops_per_target == 6 * (2 * 4 * 256 * 512 + 256 * 10_000)


def test_logits_have_a_row_for_each_target():
    device = torch.device("meta")
    assert on_meta("fcn-r")(torch.empty(3, 28, 28, device=device)).shape == (3, 10)
    assert on_meta("lstm")(torch.empty(3, 32, dtype=torch.long, device=device)).shape == (3, 32, 10_000)
    for name in NETWORKS:
        network = on_meta(name)
        assert len(network(**network.smallest_call(device))) == 1


def test_initial_weights_are_a_function_of_seed_and_name():
    torch.manual_seed(1)
    one, two, other = Lstm(50), Lstm(70), Lstm(50)
    for network, seed in ((one, 3), (two, 3), (other, 4)):
        initialise(network, seed)
    assert torch.equal(one.lstm.weight_hh_l1, two.lstm.weight_hh_l1)
    assert torch.equal(one.embed.weight, two.embed.weight[:50])
    assert not torch.equal(one.lstm.weight_hh_l1, other.lstm.weight_hh_l1)
    assert not one.lstm.bias_ih_l0.any()
    network = FullyConnected(300, 10)
    initialise(network, 3)
    assert network.hidden[0].weight.std().item() == pytest.approx(4 * (2 / 2348) ** 0.5, rel=0.01)
    assert network.head.weight.std().item() == pytest.approx((2 / 1034) ** 0.5, rel=0.05)
