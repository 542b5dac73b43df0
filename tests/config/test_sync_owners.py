"""What goes with strategies in which one rank updates a weight for all."""

import pytest

from shoal.config.layout import parse_layout, settings_of
from shoal.config.load import validate
from shoal.errors import ConfigError
from shoal.train.request import Request
from tests.train.ranks import tiny_config


def request(data, folder, words, strategy, **sections):
    config = tiny_config(
        data, parallel=settings_of(parse_layout(words)), sync={"strategy": strategy}, **sections
    )
    return Request(validate(config, "test"), folder / "run")


@pytest.mark.parametrize("words", ["zero2x2", "tp2", "pp2", "dp2*zero1x2"])
@pytest.mark.parametrize("strategy", ["central_serial", "central_parallel", "device_sharded", "tree_update"])
def test_owners_need_plain_replicas(data, tmp_path, words, strategy):
    with pytest.raises(ConfigError) as caught:
        request(data, tmp_path, words, strategy).check(parse_layout(words).world_size)
    assert caught.value.message == (
        f"sync.strategy = {strategy} under {words}: one rank updates whole weights for all others, and here "
        "each rank has a part of them"
    )
    assert caught.value.hint == "use plain replicas, such as dp2, or sync.strategy = allreduce"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["1", "dp2", "dp4"])
def test_owners_go_with_replicas_recompute_and_compile(data, tmp_path, words):
    train = {"recompute": "full", "compile": "on", "micro_batch_size": 2}
    asked = request(data, tmp_path, words, "tree_update", train=train)
    asked.check(parse_layout(words).world_size)


def test_a_setting_that_the_strategy_does_not_read_is_refused(data, tmp_path):
    config = tiny_config(data, sync={"strategy": "tree_update", "rank": 8})
    with pytest.raises(
        ConfigError, match=r"sync.rank = 8 with sync.strategy = tree_update, which does not read it"
    ):
        Request(validate(config, "test"), tmp_path / "run").check(2)
