"""When a difference is rounding, when a bug, and what is said about it."""

import math

import pytest

from shoal.config.layout import parse_layout
from shoal.parity.judge import Judge, LayoutResult
from shoal.parity.trial import Distance, TrialResult

NAMES = ["embed.weight", "block.weight", "norm.weight"]


def outcome(loss=2.0, *, block=5.0, **differences):
    """Return what a rank saw: gradients of norm 1, weights of norm 10 that went 0.1."""
    tensors = {kind: {name: Distance(0.0, 1.0) for name in NAMES} for kind in ("start", "gradient")}
    tensors["weight"] = {name: Distance(0.0, 10.0) for name in NAMES}
    for kind, changed in differences.items():
        tensors[kind].update(changed)
    return TrialResult({"embed": 1.0, "block": block}, [loss, 1.5], [3.0, 2.0], 2.5, tensors)


def judge(*reordered):
    reference = outcome()
    reference.tensors["moved"] = {name: Distance(0.0, 0.1) for name in NAMES}
    return Judge(NAMES, [reference], [[run] for run in reordered])


def verdict(judge, *ranks):
    return LayoutResult(parse_layout("tp2"), judge.findings(list(ranks)), judge.below_floor, "in a test", 0.0)


def test_equal_runs_are_rounding():
    found = verdict(judge(), outcome(), outcome())
    assert not found.is_bug
    assert found.first is None
    assert found.sentence().startswith("tp2: rounding. Losses differ by at most 0.0e+00")


@pytest.mark.parametrize(
    ("kind", "difference", "is_bug"),
    [
        ("gradient", 0.9e-5, False),
        ("gradient", 1.1e-5, True),
        ("gradient", math.inf, True),
        ("start", 1e-9, True),
        ("weight", 0.9e-3, False),
        ("weight", 1.1e-3, True),  # a part of the way that it went
    ],
)
def test_what_is_allowed_of_a_tensor(kind, difference, is_bug):
    found = verdict(judge(), outcome(**{kind: {"block.weight": Distance(difference, 1.0)}}))
    assert found.is_bug is is_bug
    assert not is_bug or (found.first.kind, found.first.name) == (kind, "block.weight")


@pytest.mark.parametrize(("loss", "is_bug"), [(2 + 3e-6, False), (2 + 5e-6, True), (math.nan, True)])
def test_what_is_allowed_of_a_loss(loss, is_bug):
    found = verdict(judge(), outcome(), outcome(loss))
    assert found.is_bug is is_bug
    assert ("The loss of step 1 differs" in found.sentence()) is is_bug
    assert ("the forward pass is at fault" in found.sentence()) is is_bug


def test_another_order_of_additions_raises_the_floor_of_its_tensor_alone():
    shaky = judge(outcome(gradient={"block.weight": Distance(1e-4, 1.0)}))
    assert not verdict(shaky, outcome(gradient={"block.weight": Distance(7e-4, 1.0)})).is_bug
    assert verdict(shaky, outcome(gradient={"block.weight": Distance(9e-4, 1.0)})).is_bug
    assert verdict(shaky, outcome(gradient={"norm.weight": Distance(7e-4, 1.0)})).is_bug


def test_the_worst_rank_counts():
    found = verdict(judge(), outcome(), outcome(gradient={"norm.weight": Distance(0.5, 1.0, 0.5)}))
    assert found.first.rank == 1
    assert "norm.weight, on rank 1: it differs by 5.0e-01 of its norm" in found.sentence()
    assert "It holds 0.50 of what it should." in found.sentence()


def test_the_first_gradient_is_the_first_of_the_backward_pass():
    wrong = {name: Distance(0.5, 1.0) for name in NAMES[:2]}
    found = verdict(judge(), outcome(gradient=wrong, weight={"embed.weight": Distance(1.0, 10.0)}))
    assert (found.first.kind, found.first.name) == ("gradient", "block.weight")
    assert "so do 1 more of 3" in found.sentence()


@pytest.mark.parametrize(("block", "is_bug"), [(5 + 8e-6, False), (5 + 12e-6, True), (math.inf, True)])
def test_an_output_that_parts_ways_comes_before_its_gradients(block, is_bug):
    found = verdict(judge(), outcome(2.1, block=block, gradient={"block.weight": Distance(0.5, 1.0)}))
    assert found.first.kind == ("output" if is_bug else "gradient")
    assert ("The forward pass of step 1 parts ways in block: the size" in found.sentence()) is is_bug


def test_a_tensor_that_no_rank_has_is_a_bug():
    lacking = outcome()
    del lacking.tensors["gradient"]["block.weight"]
    assert verdict(judge(), lacking).first.name == "block.weight"


def test_gradients_that_are_nothing_but_rounding_are_apart():
    tiny = {"block.weight": Distance(1e-9, 1e-9)}
    reference = outcome(gradient={"block.weight": Distance(0.0, 1e-9)})
    reference.tensors["moved"] = {name: Distance(0.0, 0.1) for name in NAMES}
    apart = Judge(NAMES, [reference], [[outcome(gradient=tiny)]])
    assert apart.below_floor == ["block.weight"]
    found = verdict(apart, outcome(gradient={"block.weight": Distance(2e-9, 1e-9)}))
    assert not found.is_bug
    assert found.worst("gradient").name != "block.weight"
