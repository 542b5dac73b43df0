"""Every strategy of replicas, and the classic networks, on fake GPUs."""

from __future__ import annotations

import pytest
from rich.console import Console

from shoal.config.layout import parse_layout
from shoal.data.prepare.examples import prepare_examples
from shoal.data.prepare.images import RANDOM
from shoal.data.prepare.options import PrepareOptions
from tests.rehearse.fake_cuda import DEVICE
from tests.rehearse.ranks import devices_of, on, rehearse, values_of

EXCHANGES = ("bf16", "int8", "onebit", "topk", "powersgd")
ALGORITHMS = ("ring", "chunked_ring", "tree", "halving_doubling", "hierarchical")
OWNERS = ("central_serial", "central_parallel", "device_sharded", "tree_update")
APART = {
    "model_averaging": {"every": 1},
    "block_momentum": {"every": 1},
    "diloco": {"every": 1, "int8": True},
    "streaming_diloco": {"every": 2, "fragments": 2, "overlap": 0},
    "async_sgd": {},
}
SYNCS = [
    *(("dp2", {"strategy": name}) for name in (*EXCHANGES, *OWNERS)),
    *(("dp3", {"strategy": name}) for name in ("int8", "onebit")),  # two ranks swap, three have shares
    *(("dp2*tp2", {"strategy": name}) for name in EXCHANGES),
    *(("dp2", {"algorithm": name}) for name in ALGORITHMS),
    *(("1", {"strategy": name, **settings}) for name, settings in APART.items()),
]


@pytest.mark.parametrize(("layout", "sync"), SYNCS)
def test_a_strategy_keeps_all_on_the_gpu(tmp_path, data, layout, sync):
    size = parse_layout(layout).world_size
    values = values_of(data, layout, sync=sync, train={"global_batch_size": 12})
    for job in rehearse(tmp_path, values, size):
        owns = bool(job.model.updated_weights())  # some owners have no weight of their own
        assert devices_of(job) == (on(DEVICE) if owns else {what: set() for what in on(DEVICE)})
        kept = [*job.model.exchange.state().values(), *job.model.exchange.common_state().values()]
        assert {tensor.device for tensor in kept} <= {DEVICE}
        assert bool(kept) == (sync.get("strategy") in EXCHANGES[1:])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("network", ["fcn-r", "lstm"])
def test_a_classic_network_trains(tmp_path, data, network, replicas):
    if network == "fcn-r":
        options = PrepareOptions((str(RANDOM),), tmp_path / "images", limit=60, split="8,1,1")
        data = prepare_examples(options, Console(quiet=True)).path
    values = values_of(data, f"dp{replicas}" if replicas > 1 else "1")
    values["model"] = {"network": network}
    if network == "fcn-r":
        del values["train"]["seq_len"]
    for job in rehearse(tmp_path / "run", values, replicas):
        assert devices_of(job) == on(DEVICE)
