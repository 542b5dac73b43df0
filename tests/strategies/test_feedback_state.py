"""What is held back goes on under another number of replicas, and nowhere else."""

from types import SimpleNamespace

import pytest
import torch

from shoal.config.layout import Layout, parse_layout
from shoal.strategies.feedback_state import FeedbackState


class Holding:
    """An exchange with a residual, and something that all replicas have alike."""

    traffic = None

    def __init__(self, name, value):
        self.name = name
        self._own = {"residual.w": torch.full((3,), float(value))} if name else {}
        self._common = {"q.w": torch.full((2,), 0.5)} if name else {}

    def state(self):
        return self._own

    def common_state(self):
        return self._common


def ranks_of(layout: Layout, name="onebit", value=lambda replica, part: 0, split=()):
    """Return what each rank holds back, replica by replica."""
    places = [
        (r, p) for r in range(layout.dp_replicate) for p in range(layout.world_size // layout.dp_replicate)
    ]
    meshes = [SimpleNamespace(layout=layout, replica=replica, part=part) for replica, part in places]
    return [FeedbackState(Holding(name, value(mesh.replica, mesh.part)), mesh, split) for mesh in meshes]


def moved(old, new):
    """Save by some ranks, load by others; return the residuals, or None where nothing was asked for."""
    files = {name: tensor.clone() for rank in old for name, tensor in rank.tensors().items()}
    asked_of_all = set()
    for rank in new:
        asked = rank.expect(old[0].state())
        for name, tensor in asked.items():
            tensor.copy_(files[name])
        rank.start(0)
        asked_of_all |= asked.keys()
    assert asked_of_all in (set(), files.keys())  # a folder is read whole, or not at all
    return [[float(t[0]) for name, t in rank.tensors().items() if "residual" in name] for rank in new]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (2, 2, [1, 10]),
        (3, 2, [1 + 100, 10]),
        (4, 2, [1 + 100, 10 + 1000]),
        (2, 3, [1, 10, 0]),
        (1, 4, [1, 0, 0, 0]),
    ],
)
def test_the_sum_stays_for_any_number_of_replicas(before, after, expected):
    old = ranks_of(Layout(dp_replicate=before), value=lambda replica, _: 10**replica)
    new = ranks_of(Layout(dp_replicate=after), value=lambda *_: 77)
    assert moved(old, new) == [[value] for value in expected]


def test_what_is_taken_over_is_added_once():
    old = ranks_of(Layout(dp_replicate=3), value=lambda replica, _: 10**replica)
    new = ranks_of(Layout(dp_replicate=2))
    moved(old, new)
    new[0].start(5)
    assert [float(t[0]) for name, t in new[0].tensors().items() if "residual" in name] == [101]


def test_each_part_of_a_replica_keeps_its_own():
    old = ranks_of(parse_layout("dp2*tp2"), value=lambda replica, part: 10**replica * (1 + part))
    new = ranks_of(parse_layout("dp4*tp2"), value=lambda *_: 77)
    assert moved(old, new) == [[value] for value in (1, 2, 10, 20, 0, 0, 0, 0)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (("dp2", "onebit", ()), ("dp2", "topk", ()), "onebit, inner layout 1 then, topk, inner layout 1 now"),
        (("dp2", "onebit", ()), ("dp2", "", ()), "onebit, inner layout 1 then, none held now"),
        (("dp2*tp2", "onebit", ()), ("dp2", "onebit", ()), "onebit, inner layout tp2 then, onebit"),
        (("pp2*dp2", "int8", (1, 3)), ("pp2*dp2", "int8", (2, 2)), "int8, inner layout pp2 1 3 then"),
        (("dp2", "", ()), ("dp2", "onebit", ()), "none held then, onebit, inner layout 1 now"),
    ],
)
def test_another_strategy_or_inner_layout_drops_it_and_says_so(caplog, old, new, words):
    olds, news = (
        ranks_of(parse_layout(layout), name, lambda *_: 5, split) for layout, name, split in (old, new)
    )
    with caplog.at_level("INFO", logger="shoal"):
        residuals = moved(olds, news)
    assert all(not any(own) for own in residuals)
    assert f"gradients that were held back are dropped: {words}" in caplog.text


def test_plain_runs_say_nothing(caplog):
    with caplog.at_level("INFO", logger="shoal"):
        moved(ranks_of(Layout(dp_replicate=2), ""), ranks_of(Layout(dp_replicate=2), ""))
    assert not caplog.text
