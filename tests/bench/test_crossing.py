"""What a strategy says it sends is all that crosses the cable between two hosts."""

import pytest

from shoal.bench.cells import Cell, Network, parse_way, run
from shoal.bench.gradsync import HOSTS
from shoal.config.sync_rules import STRATEGIES
from tests.tiny_dataset import random_dataset
from tests.two_hosts import make_hosts

STEPS = 40
SIZES = {"model.n_layers": "2", "model.d_model": "128", "train.seq_len": "32", "eval.sequences": "4"}
FEWER = "every=10"  # steps of a replica by itself
HEADERS = 1.06  # of TCP, IP and Ethernet, and what answers what comes
OTHER_BYTES = 150_000  # to meet, and each step what ranks agree on: losses, norms, stops


def word_of(name):
    return f"{name}:{FEWER}" if "every" in STRATEGIES[name].reads else name


OTHERS = (word_of(name) for name in STRATEGIES if name != "allreduce")


@pytest.mark.proof
@pytest.mark.parametrize("word", ["allreduce:algorithm=chunked_ring", *OTHERS])
def test_nothing_else_crosses(tmp_path, word):
    network = Network("gpt", "tiny", random_dataset(tmp_path / "data"), 4, SIZES)
    cell = Cell(network, parse_way(word, STEPS), 2, HOSTS, STEPS)
    with make_hosts() as hosts:
        outcome = run(cell, tmp_path, hosts, lambda step: None)
        assert outcome.found is not None, outcome.reason
        counted, crossed = sum(outcome.found.sync_bytes), hosts.sent_bytes("north")
    assert counted > 2 * OTHER_BYTES
    assert counted < crossed < HEADERS * counted + OTHER_BYTES
