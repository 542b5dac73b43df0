"""Rules of strategies whose replicas train apart: each is refused before anything starts, with its reason."""

import pytest

from shoal.config.layout import parse_layout
from shoal.config.load import validate
from shoal.config.sync_rules import check_sync
from shoal.errors import ConfigError

STREAMING = {"strategy": "streaming_diloco", "every": 20, "fragments": 4, "overlap": 4}


def config(**sync):
    return validate({"sync": sync, "train": {"steps": 100}}, "test")


@pytest.mark.parametrize(
    ("sync", "message", "hint"),
    [
        (
            {"strategy": "diloco", "every": 101},
            "sync.every = 101 with train.steps = 100: replicas would train apart all the way",
            "use sync.every = 10, or more train.steps",
        ),
        (
            {"strategy": "diloco", "block": 32},
            "sync.block = 32 with sync.int8 = false: gradients are sent whole",
            "set sync.int8 = true",
        ),
        (
            STREAMING | {"fragments": 13, "overlap": 0},
            "sync.fragments = 13 with model.n_layers = 12, sync.every = 20: a part has at least one block",
            "use sync.fragments = 12 or less",
        ),
        (
            STREAMING | {"every": 3},
            "sync.fragments = 4 with model.n_layers = 12, sync.every = 3",
            "use sync.fragments = 3 or less",
        ),
        (
            STREAMING | {"overlap": 5},
            "sync.overlap = 5 with a part of the model every sync.every / sync.fragments = 5 steps: "
            "its exchange would be under way when that of the next one begins",
            "use sync.overlap <= 4, or sync.every = 24",
        ),
        (
            {"strategy": "model_averaging", "momentum": 0.5},
            "sync.momentum = 0.5 with sync.strategy = model_averaging, which does not read it",
            "choose a strategy that does: block_momentum, diloco, streaming_diloco",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(sync, message, hint):
    with pytest.raises(ConfigError) as caught:
        check_sync(config(**sync), parse_layout("dp4"), 12)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "sync",
    [STREAMING, STREAMING | {"fragments": 1, "overlap": 0}, {"strategy": "block_momentum", "every": 100}],
)
@pytest.mark.parametrize("layout", ["1", "dp4", "dp2*zero2x2", "pp2*dp2*tp2"])
def test_any_layout_may_lie_inside_a_replica(sync, layout):
    check_sync(config(**sync), parse_layout(layout), 12)


def test_a_replica_counts_the_others_as_parts_of_the_batch():
    layout = parse_layout("pp2*dp2*zero1x2").as_replica_group()
    assert (layout.world_size, layout.dp, layout.num_replicas, layout.batch_parts) == (4, 2, 2, 4)
    assert str(layout) == "pp2*dp2*zero1x2"
