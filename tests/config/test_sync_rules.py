"""Settings of the section sync that do not go together are refused before any process starts, in words."""

import pytest

from shoal.config.layout import parse_layout, settings_of
from shoal.config.sync_rules import RULES
from shoal.errors import ConfigError
from shoal.train.request import Request
from tests.config.configs import config_of

FOUR = {"model": {"n_layers": 4, "n_heads": 4}, "train": {"global_batch_size": 16, "micro_batch_size": 1}}
CASES = [  # rule, layout, settings, message, hint, settings that follow it
    (
        "_settings",
        "dp2",
        {"sync": {"strategy": "bf16", "density": 0.5}},
        "sync.density = 0.5 with sync.strategy = bf16, which does not read it",
        "leave it out, or choose a strategy that does: topk",
        {"sync": {"strategy": "topk"}},
    ),
    (
        "_owners",
        "tp2",
        {"sync": {"strategy": "tree_update"}},
        "sync.strategy = tree_update under tp2: one rank updates whole weights for all others, and here each "
        "rank has a part of them",
        "use plain replicas, such as dp2, or sync.strategy = allreduce",
        {"parallel": {"tp": 1}},
    ),
    (
        "_settings",
        "dp2",
        {"sync": {"strategy": "diloco", "staleness": 2}},
        "sync.staleness = 2 with sync.strategy = diloco, which does not read it",
        "leave it out, or choose a strategy that does: async_sgd",
        {"sync": {"strategy": "async_sgd"}},
    ),
    *(
        (
            "_owners",
            words,
            {"sync": {"strategy": "async_sgd"}},
            f"sync.strategy = async_sgd under {words}: one rank updates whole weights for all others, and "
            "here each rank has a part of them",
            "use plain replicas, such as dp2, or sync.strategy = allreduce",
            {"parallel": {"tp": 1, "pp": 1, "zero": 0, "dp_shard": 0}},
        )
        for words in ("dp2*tp2", "pp2", "dp2*zero1x2")
    ),
    (
        "_reduce_dtype",
        "dp2",
        {"sync": {"strategy": "async_sgd"}, "precision": {"reduce_dtype": "bf16"}},
        "precision.reduce_dtype = bf16 with sync.strategy = async_sgd, which has a format of its own for "
        "what it sends",
        "leave reduce_dtype at fp32, or use sync.strategy = allreduce",
        {"precision": {"reduce_dtype": "fp32"}},
    ),
    (
        "_somebody_to_agree_with",
        "zero2x4",
        {"sync": {"strategy": "onebit"}},
        "sync.strategy = onebit under zero2x4, which has one replica: ZeRO sums gradients to its shards by "
        "itself, and nothing is left to agree on",
        "set parallel.dp_shard to a part of the processes, as in dp2*zero2x2, or parallel.zero = 0",
        {"parallel": {"dp_shard": 2}},
    ),
    (
        "_somebody_to_agree_with",
        "tp2",
        {"sync": {"algorithm": "tree"}},
        "sync.algorithm = tree under tp2, which has one replica: there is nobody to agree with",
        "leave the section sync out, or add replicas, as in dp2*tp2",
        {"parallel": {"tp": 1}},
    ),
    (
        "_somebody_to_agree_with",
        "zero2x4",
        {"sync": {"strategy": "diloco", "every": 2}},
        "sync.strategy = diloco under zero2x4, which has one replica: ZeRO sums gradients to its shards by "
        "itself, and nothing is left to agree on",
        "set parallel.dp_shard to a part of the processes, as in dp2*zero2x2, or parallel.zero = 0",
        {"parallel": {"dp_shard": 2}},
    ),
    (
        "_reduce_dtype",
        "dp2",
        {"sync": {"strategy": "int8"}, "precision": {"reduce_dtype": "bf16"}},
        "precision.reduce_dtype = bf16 with sync.strategy = int8, which has a format of its own for what "
        "it sends",
        "leave reduce_dtype at fp32, or use sync.strategy = allreduce",
        {"sync": {"strategy": "allreduce"}},
    ),
    (
        "_reduce_dtype",
        "dp2*tp2",
        {"sync": {"strategy": "diloco", "every": 2}, "precision": {"reduce_dtype": "bf16"}},
        "precision.reduce_dtype = bf16 with sync.strategy = diloco, which has a format of its own for what "
        "it sends",
        "leave reduce_dtype at fp32, or use sync.strategy = allreduce",
        {"precision": {"reduce_dtype": "fp32"}},
    ),
    (
        "_warmup",
        "dp2",
        {"sync": {"strategy": "onebit", "warmup_steps": 5}},
        "sync.warmup_steps = 5 with train.steps = 5: sync.strategy = onebit would never begin",
        "use fewer steps of warm-up, or sync.strategy = allreduce",
        {"sync": {"warmup_steps": 4}},
    ),
    *(
        (
            "_norm",
            "dp2",
            {"model": {"batch_statistics": "synchronised"}, "sync": sync},
            "model.batch_statistics = synchronised with model.network = decoder and sync.strategy = "
            f"{strategy}: it is for networks with batch normalisation, whose replicas take each step "
            "together",
            "use model.batch_statistics = replica",
            {"model": {"batch_statistics": "replica"}},
        )
        for strategy, sync in (("allreduce", {}), ("diloco", {"strategy": "diloco", "every": 2}))
    ),
    (
        "_slow_link",
        "dp2",
        {"runtime": {"slow_link": 100.0}},
        "runtime.slow_link = 100 with the back end's own all-reduce, which cannot be slowed",
        "use sync.algorithm = chunked_ring, or another sync.strategy",
        {"sync": {"algorithm": "chunked_ring"}},
    ),
    (
        "_slow_link",
        "dp2",
        {"runtime": {"slow_link": 100.0, "device": "cuda"}, "sync": {"strategy": "int8"}},
        "runtime.slow_link = 100 on cuda: transfers between GPUs are not slowed",
        "use runtime.device = cpu",
        {"runtime": {"slow_link": 100.0, "device": "cpu"}},
    ),
]


@pytest.mark.parametrize(("rule", "words", "settings", "message", "hint", "advice"), CASES)
def test_a_refusal_gives_its_reason_and_what_to_choose(
    data, tmp_path, rule, words, settings, message, hint, advice
):
    layout = parse_layout(words)
    settings = FOUR | {"parallel": settings_of(layout)} | settings
    with pytest.raises(ConfigError) as caught:
        Request(config_of(data, settings), tmp_path).check(layout.world_size)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    Request(config_of(data, settings, advice), tmp_path).check(layout.world_size)


def test_every_rule_has_a_case():
    elsewhere = {"_outer"}  # test_outer_rules.py
    assert {rule.__name__ for rule in RULES} == {case[0] for case in CASES} | elsewhere


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("1", {"sync": {"strategy": "onebit"}}),  # the same command for one process
        ("dp2*zero2x2", {"sync": {"strategy": "topk"}, "precision": {"reduce_dtype": "bf16"}}),
        (
            "dp2*zero2x2",
            {"sync": {"strategy": "diloco", "every": 2}, "precision": {"reduce_dtype": "bf16"}},
        ),
        ("pp2*dp2", {"sync": {"strategy": "powersgd"}}),
        ("dp2", {"sync": {"algorithm": "ring"}, "precision": {"reduce_dtype": "bf16"}}),
    ],
)
def test_what_goes_together(data, tmp_path, words, settings):
    layout = parse_layout(words)
    Request(config_of(data, FOUR | {"parallel": settings_of(layout)} | settings), tmp_path).check(
        layout.world_size
    )
