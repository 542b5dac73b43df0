"""Layouts in words and in settings, and what is said about those that cannot be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.layout import SCHEDULES, Layout, parse_layout, resolve_layout, settings_of, under
from shoal.config.sections import Config, Parallel
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ("1", Layout()),
        ("dp2", Layout(dp_replicate=2)),
        ("zero3x4", Layout(dp_shard=4, zero=3)),
        ("dp2*zero1x2", Layout(dp_replicate=2, dp_shard=2, zero=1)),
        ("tp2+sp", Layout(tp=2, sequence=True)),
        ("pp2+interleaved * tp4", Layout(pp=2, tp=4, schedule="interleaved")),
        ("tp2*pp2", Layout(pp=2, tp=2)),
    ],
)
def test_words_name_the_axes(words, layout):
    assert parse_layout(words) == layout


def layouts():
    size = st.integers(1, 4)

    def make(pp, replicate, shard, tp, zero, sequence, schedule):
        return Layout(
            pp,
            replicate,
            shard if zero else 1,
            tp,
            zero,
            sequence and tp > 1,
            schedule if pp > 1 else "1f1b",
        )

    return st.builds(
        make, size, size, size, size, st.integers(0, 3), st.booleans(), st.sampled_from(SCHEDULES)
    )


@settings(deadline=None)
@given(layouts())
def test_words_and_settings_say_all_of_a_layout(layout):
    assert parse_layout(str(layout)) == layout
    assert resolve_layout(Parallel(**settings_of(layout)), layout.world_size) == layout
    assert layout.world_size == layout.pp * layout.dp * layout.tp


@pytest.mark.parametrize(
    "words", ["", "tp", "tp0", "dp00", "2", "zero4x2", "zero3", "pp2+fifo", "dp2*", "tp2+1f1b"]
)
def test_what_is_no_word_is_shown_with_those_that_are(words):
    with pytest.raises(ConfigError, match=r"'.*' in layout '.*' is no layout word") as caught:
        parse_layout(words)
    assert repr(words) in caught.value.message
    assert caught.value.hint == (
        "join with *: dp2, zero3x4, tp2, tp2+sp, pp2, pp2+gpipe (or +interleaved, +zero_bubble)"
    )


@pytest.mark.parametrize(("words", "axis"), [("dp2*dp2", "dp_replicate"), ("tp2*pp2*tp4", "tp")])
def test_an_axis_that_is_named_twice_is_refused(words, axis):
    with pytest.raises(ConfigError, match=f"sets {axis} twice") as caught:
        parse_layout(words)
    assert repr(words) in caught.value.message
    assert caught.value.hint == "name each axis once"


@pytest.mark.parametrize(
    ("settings", "world_size", "message", "hint"),
    [
        (
            {"tp": 2, "pp": 3},
            8,
            "8 processes cannot be laid out with parallel.tp = 2 and parallel.pp = 3: the product 6 does "
            "not divide them",
            "start 6 or 12 processes (--nproc)",
        ),
        (
            {"tp": 4},
            2,
            "2 processes cannot be laid out with parallel.tp = 4 and parallel.pp = 1: the product 4 does "
            "not divide them",
            "start 4 processes (--nproc)",
        ),
        (
            {"dp_shard": 2},
            4,
            "parallel.dp_shard = 2 with parallel.zero = 0: nothing would be sharded",
            "set parallel.zero = 1, 2 or 3, or leave dp_shard at 0",
        ),
        (
            {"zero": 3, "dp_shard": 4, "tp": 2},
            12,
            "parallel.dp_shard = 4 does not divide the 6 data-parallel processes that tp and pp leave",
            "use parallel.dp_shard = 1, 2, 3, 6, or 0 for all of them",
        ),
    ],
)
def test_processes_that_do_not_fit_the_axes_are_refused(settings, world_size, message, hint):
    with pytest.raises(ConfigError) as caught:
        resolve_layout(Parallel(**settings), world_size)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_what_the_axes_leave_is_replicated_or_with_zero_sharded():
    assert resolve_layout(Parallel(tp=2), 8) == Layout(dp_replicate=4, tp=2)
    assert resolve_layout(Parallel(tp=2, zero=2), 8) == Layout(dp_shard=4, tp=2, zero=2)
    assert resolve_layout(Parallel(zero=2, dp_shard=2), 8) == Layout(dp_replicate=4, dp_shard=2, zero=2)


def test_a_configuration_keeps_a_split_and_offload_under_layouts_that_can_have_them():
    config = Config(parallel=Parallel(tp=2, pp=2, zero=2, split=(3, 1), offload=True))
    assert under(config, parse_layout("pp2")).parallel == Parallel(pp=2, split=(3, 1))
    assert under(config, parse_layout("pp4")).parallel == Parallel(pp=4)
    assert under(config, parse_layout("zero3x2")).parallel == Parallel(zero=3, dp_shard=2, offload=True)
