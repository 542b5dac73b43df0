"""Settings that do not go together under a layout: each is refused before any process starts, in words."""

import inspect
from typing import Any, NamedTuple

import pytest

from shoal.config import layout_rules
from shoal.config.layout import resolve_layout
from shoal.config.layout_rules import RULES
from shoal.errors import ConfigError
from shoal.models.shape import resolve_shape
from shoal.train.request import Request
from tests.config.configs import config_of
from tests.tiny_dataset import VOCAB_SIZE
from tests.train.commands import shoal

FOUR = {"n_layers": 4, "n_heads": 4}


class Case(NamedTuple):
    """Settings on some processes that a rule refuses, its words, and settings that follow its advice."""

    rule: str
    world_size: int
    settings: dict[str, dict[str, Any]]
    message: str
    hint: str
    advice: dict[str, dict[str, Any]]


CASES = [
    Case(
        "_tensor_cut",
        4,
        {"model": {"n_heads": 6, "d_model": 48}, "parallel": {"tp": 4}},
        "model.n_heads = 6 is not divisible by parallel.tp = 4: attention is cut by heads",
        "use parallel.tp = 1, 2, 3, 6",
        {"parallel": {"tp": 2}},
    ),
    Case(
        "_tensor_cut",
        4,
        {"model": FOUR | {"style": "llama", "n_kv_heads": 2}, "parallel": {"tp": 4}},
        "model.n_kv_heads = 2 is not divisible by parallel.tp = 4: key and value heads are cut with their "
        "queries",
        "use parallel.tp = 1, 2",
        {"parallel": {"tp": 2}},
    ),
    Case(
        "_tensor_cut",
        4,
        {"model": FOUR | {"d_ff": 130}, "parallel": {"tp": 4}},
        "model.d_ff = 130 is not divisible by parallel.tp = 4: the MLP is cut by its width",
        "use parallel.tp = 1, 2",
        {"parallel": {"tp": 2}},
    ),
    Case(
        "_tensor_cut",
        2,
        {"model": FOUR | {"pad_vocab_multiple": 1}, "parallel": {"tp": 2}},
        "the padded vocabulary = 257 is not divisible by parallel.tp = 2: embedding and head are cut by ids",
        "use parallel.tp = 1",
        {"parallel": {"tp": 1}},
    ),
    Case(
        "_sequence",
        2,
        {"parallel": {"sequence": True}},
        "parallel.sequence = true with parallel.tp = 1: there is nobody to share the sequence with",
        "set parallel.tp to 2 or more, or parallel.sequence = false",
        {"parallel": {"tp": 2}},
    ),
    Case(
        "_sequence",
        4,
        {"model": FOUR, "parallel": {"tp": 4, "sequence": True}, "train": {"seq_len": 14}},
        "train.seq_len = 14 is not divisible by parallel.tp = 4: parallel.sequence cuts each sequence into "
        "that many parts",
        "use train.seq_len = 12, or parallel.sequence = false",
        {"train": {"seq_len": 12}},
    ),
    Case(
        "_sequence",
        2,
        {"parallel": {"tp": 2, "sequence": True}, "eval": {"seq_len": 15}},
        "eval.seq_len = 15 is not divisible by parallel.tp = 2: parallel.sequence cuts each sequence into "
        "that many parts",
        "use eval.seq_len = 14, or parallel.sequence = false",
        {"parallel": {"sequence": False}},
    ),
    Case(
        "_stages",
        2,
        {"model": FOUR, "parallel": {"pp": 2, "split": (1, 2)}},
        "parallel.split = [1, 2] names 2 stages with 3 layers; parallel.pp = 2 with schedule 1f1b needs 2 "
        "stages with model.n_layers = 4",
        "use parallel.split = [2, 2], or leave it out",
        {"parallel": {"split": (2, 2)}},
    ),
    Case(
        "_stages",
        2,
        {"model": FOUR | {"n_layers": 5}, "parallel": {"pp": 2, "split": (3, 2), "schedule": "interleaved"}},
        "parallel.split = [3, 2] names 2 stages with 5 layers; parallel.pp = 2 with schedule interleaved "
        "needs 4 stages with model.n_layers = 5",
        "use parallel.split = [2, 1, 1, 1], or leave it out",
        {"parallel": {"split": ()}},
    ),
    Case(
        "_stages",
        4,
        {"model": {"n_layers": 2}, "parallel": {"pp": 4}, "train": {"micro_batch_size": 4}},
        "model.n_layers = 2 over 4 pipeline stages leaves a stage without a layer",
        "use parallel.pp = 2 or less, and at least one layer a stage",
        {"parallel": {"pp": 2}},
    ),
    Case(
        "_stages",
        2,
        {"model": FOUR, "parallel": {"pp": 2, "split": (4, 0)}},
        "model.n_layers = 4 over 2 pipeline stages leaves a stage without a layer",
        "use parallel.pp = 4 or less, and at least one layer a stage",
        {"parallel": {"split": (3, 1)}},
    ),
    Case(
        "_micro_batches",
        4,
        {"model": FOUR, "parallel": {"pp": 4}, "train": {"micro_batch_size": 8}},
        "parallel.pp = 4: schedule 1f1b fills 4 stages with 2 micro-batches (train.global_batch_size = 16, "
        "micro_batch_size = 8, 1 data-parallel process)",
        "use train.micro_batch_size = 1, 2, 4, or parallel.schedule = gpipe",
        {"train": {"micro_batch_size": 4}},
    ),
    Case(
        "_micro_batches",
        2,
        {
            "model": FOUR,
            "parallel": {"pp": 2, "schedule": "interleaved"},
            "train": {"global_batch_size": 12, "micro_batch_size": 4},
        },
        "parallel.pp = 2: schedule interleaved takes micro-batches in rounds of 2, and there are 3 "
        "(train.global_batch_size = 12, micro_batch_size = 4, 1 data-parallel process)",
        "use train.micro_batch_size = 1, 2, 3, 6, or parallel.schedule = gpipe",
        {"train": {"micro_batch_size": 3}},
    ),
    Case(
        "_micro_batches",
        4,
        {
            "model": FOUR,
            "parallel": {"pp": 4},
            "train": {"global_batch_size": 2, "micro_batch_size": 1},
        },
        "parallel.pp = 4: schedule 1f1b fills 4 stages with 2 micro-batches (train.global_batch_size = 2, "
        "micro_batch_size = 1, 1 data-parallel process)",
        "use a larger global_batch_size, or parallel.schedule = gpipe",
        {"parallel": {"schedule": "gpipe"}},
    ),
    Case(
        "_micro_batches",
        2,
        {
            "model": FOUR,
            "parallel": {"pp": 2, "schedule": "zero_bubble"},
            "train": {"global_batch_size": 12, "micro_batch_size": 4},
        },
        "parallel.pp = 2: schedule zero_bubble takes micro-batches in rounds of 2, and there are 3 "
        "(train.global_batch_size = 12, micro_batch_size = 4, 1 data-parallel process)",
        "use train.micro_batch_size = 1, 2, 3, 6, or parallel.schedule = gpipe",
        {"train": {"micro_batch_size": 2}},
    ),
    Case(
        "_zero_bubble",
        4,
        {"model": FOUR, "parallel": {"pp": 2, "schedule": "zero_bubble", "zero": 2}},
        "parallel.schedule = zero_bubble with parallel.zero = 2: torch's split backward does not run the "
        "hooks by which sharded gradients are kept, and they would be lost",
        "use parallel.schedule = 1f1b or interleaved, or parallel.zero = 0",
        {"parallel": {"schedule": "interleaved"}},
    ),
    Case(
        "_zero_bubble",
        2,
        {"model": FOUR, "parallel": {"pp": 2, "schedule": "zero_bubble"}, "train": {"recompute": "full"}},
        "parallel.schedule = zero_bubble with train.recompute = full: each of the two halves of a backward "
        "pass would compute everything again",
        "use parallel.schedule = 1f1b, or train.recompute = none",
        {"train": {"recompute": "none"}},
    ),
    Case(
        "_optimisers",
        2,
        {"optimizer": {"name": "muon"}, "parallel": {"tp": 2}},
        "optimizer.name = muon under tp2: its update needs whole matrices, and here each process has a part "
        "of them",
        "use optimizer.name = adamw, or only dp and pp",
        {"parallel": {"tp": 1, "pp": 2}},
    ),
    Case(
        "_optimisers",
        4,
        {"optimizer": {"name": "muon"}, "parallel": {"zero": 1, "dp_shard": 2}},
        "optimizer.name = muon under dp2*zero1x2: its update needs whole matrices, and here each process has "
        "a part of them",
        "use optimizer.name = adamw, or only dp and pp",
        {"optimizer": {"name": "adamw"}},
    ),
    Case(
        "_offload",
        2,
        {"parallel": {"offload": True}},
        "parallel.offload = true with parallel.zero = 0: only sharded state is kept in host memory",
        "set parallel.zero = 1, 2 or 3",
        {"parallel": {"zero": 1}},
    ),
    Case(
        "_offload",
        4,
        {"parallel": {"offload": True, "zero": 2, "dp_shard": 2}},
        "parallel.offload = true under dp2*zero2x2: what other axes sum after the backward pass must lie on "
        "the GPUs",
        "use ZeRO over all processes, such as zero2x4, or parallel.offload = false",
        {"parallel": {"zero": 2, "dp_shard": 4}},
    ),
    Case(
        "_compile",
        2,
        {"model": FOUR, "parallel": {"pp": 2}, "train": {"compile": "on"}},
        "train.compile = on with parallel.pp = 2: with torch 2.13, a pipeline's schedules cut each backward "
        "pass in ways that were not tried with compiled blocks",
        "use train.compile = off (or auto)",
        {"train": {"compile": "off"}},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.message.partition(':')[0]}")
def test_a_refusal_says_what_was_given_what_is_allowed_and_what_to_choose(data, tmp_path, case):
    run = tmp_path / "run"
    with pytest.raises(ConfigError) as caught:
        Request(config_of(data, case.settings), run).check(case.world_size)
    assert (caught.value.message, caught.value.hint) == (case.message, case.hint)
    Request(config_of(data, case.settings, case.advice), run).check(case.world_size)
    assert not run.exists()


def test_every_refusal_of_every_rule_has_a_case():
    for rule in RULES:
        written = inspect.getsource(layout_rules._cuts if rule.__name__ == "_tensor_cut" else rule).count(
            "yield ("
        )
        assert sum(case.rule == rule.__name__ for case in CASES) >= written > 0, rule.__name__


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_each_refusal_comes_from_its_rule(data, case):
    config = config_of(data, case.settings)
    layout = resolve_layout(config.parallel, case.world_size)
    shape = resolve_shape(config.model, VOCAB_SIZE)
    (rule,) = (rule for rule in RULES if rule.__name__ == case.rule)
    assert (case.message, case.hint) in list(rule(config, layout, shape))


def test_the_command_refuses_with_status_2_before_any_process_starts(data, tmp_path):
    status, screen = shoal(data, tmp_path / "run", "--nproc", "3", "--parallel.tp", "3")
    assert status == 2
    assert "model.n_heads = 2 is not divisible by parallel.tp = 3: attention is cut by heads" in screen
    assert "hint: use parallel.tp = 1, 2\n" in screen
    assert not (tmp_path / "run").exists()
