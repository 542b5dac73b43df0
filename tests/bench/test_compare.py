"""`shoal bench compare`: noise is no difference, a shift is found, and few samples tell nothing."""

import re

import pytest

from shoal.bench.compare import command, judge
from shoal.errors import InputError
from tests.bench import made_up
from tests.bench.made_up import gradsync_cell, network_row, samples


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_samples_of_one_distribution_do_not_differ(noise):
    words = [judge(samples(1, 30, noise, seed), samples(1, 30, noise, seed + 100)).word for seed in range(40)]
    assert words.count("no difference") >= 38  # of 99 % intervals, wider by 2 %


@pytest.mark.parametrize(("factor", "word"), [(1.2, "slower"), (1 / 1.2, "faster")])
def test_a_shift_of_20_percent_is_found_in_noise(factor, word):
    for seed in range(20):
        found = judge(samples(1, 20, 0.05, seed), samples(factor, 20, 0.05, seed + 100))
        assert found.word == word
        assert found.low < factor < found.high
        assert found.low <= found.ratio <= found.high


def test_a_shift_that_is_sure_and_negligible_is_no_difference():
    assert judge(samples(1, 200, 0.001), samples(1.01, 200, 0.001, 1)).word == "no difference"
    assert judge(samples(1, 200, 0.001), samples(1.03, 200, 0.001, 1)).word == "slower"


def test_a_bimodal_row_s_interval_has_both_of_its_medians():
    slow_half = [1.0, 1.5] * 10
    assert judge(slow_half, [1.0, 1.5] * 10).word == "no difference"


def test_of_two_samples_nothing_is_said():
    assert judge([1.0, 1.1], samples(2.0)).word == "too few samples to say"
    assert judge(samples(2.0), [1.0] * 4).word == "too few samples to say"
    assert judge(samples(2.0), [1.0] * 5).word == "faster"


def test_a_verdict_is_the_same_each_time():
    assert judge(samples(1), samples(1.1)) == judge(samples(1), samples(1.1))


@pytest.fixture
def compare(tmp_path, capsys):
    """Return a function that compares two records and gives the status and the words."""

    def run(a, b, **options):
        status = command(*made_up.write(tmp_path, a=a, b=b), **{"fail_above": None, **options})
        return status, " ".join(capsys.readouterr().out.split())

    return run


def test_rows_are_compared_and_those_of_one_record_named(compare):
    a = made_up.networks([network_row(batch=32), network_row(batch=128), network_row("lstm")])
    slower = [1.2 * one for one in network_row(batch=32)["samples"]]
    b = made_up.networks([network_row(batch=32, samples=slower), network_row(batch=128), network_row("gpt")])
    status, words = compare(a, b)
    assert status == 0
    assert re.search(
        r"fcn-r pytorch default batch 32, 4 threads \S+ \S+ 1\.200 1\.\d+ to 1\.\d+ slower", words
    )
    assert re.search(r"batch 128, 4 threads \S+ \S+ 1\.000 0\.\d+ to 1\.\d+ no difference", words)
    assert re.search(r"only in \S+a\.json: lstm pytorch", words)
    assert re.search(r"only in \S+b\.json: gpt pytorch", words)
    assert "2 common rows. The ratio is that of the medians, B / A. Its interval holds 99%" in words
    assert "warning" not in words


def test_status_1_means_clearly_slower_than_the_limit(compare):
    a = made_up.networks([network_row(samples=samples(1.0))])
    b = made_up.networks([network_row(samples=samples(1.2, seed=1))])
    status, words = compare(a, b, fail_above=1.05)
    assert (status, "slower than 1.05 times: fcn-r" in words) == (1, True)
    assert compare(a, b, fail_above=1.25)[0] == 0
    assert compare(a, b, fail_above=1.19)[0] == 0  # the interval reaches below
    assert compare(b, a, fail_above=1.05)[0] == 0


def test_what_else_differs_is_a_warning(compare):
    a, b = (made_up.networks([network_row()]) for _ in range(2))
    b["machine"] = {**b["machine"], "physical_cores": 8}
    b["versions"] = {**b["versions"], "torch": "2.14.0"}
    b["options"] = {"steps": 10, "warmup": 5}
    b["rows"][0] |= {"layers": "xyz", "versions": {"pytorch": "2"}}
    _, words = compare(a, b)
    assert "warning: machine.physical_cores is 4 in A and 8 in B" in words
    assert "warning: versions.torch is '2.13.0' in A and '2.14.0' in B" in words
    assert "warning: options.steps is 20 in A and 10 in B" in words
    for what in ("versions", "layers"):
        assert f"warning: fcn-r pytorch default batch 128, 4 threads has other {what} in B" in words


def test_strategies_are_compared_by_whole_periods(compare):
    """Steps of which each twentieth is slow do not differ by where it is."""
    steps = ([0.1] * 19 + [1.0]) * 6
    a = {**made_up.gradsync(), "cells": [gradsync_cell("diloco:every=20", period=20, step_s=steps, skip=0)]}
    moved = gradsync_cell("diloco:every=20", period=20, step_s=[1.0, *steps[:-1]], skip=0)
    status, words = compare(a, {**a, "cells": [moved]}, fail_above=1.01)
    assert status == 0
    assert "no difference" in words


@pytest.mark.parametrize("record", [made_up.gradsync(), made_up.collectives(), made_up.networks([])])
def test_records_without_common_kinds_of_samples_are_refused(compare, record):
    with pytest.raises(InputError, match="have no samples of the same kind of rows"):
        compare(made_up.networks(), record)


@pytest.mark.parametrize("limit", [0.9, float("nan"), float("inf")])
def test_a_limit_below_1_is_refused(compare, limit):
    with pytest.raises(InputError, match="--fail-above"):
        compare(made_up.networks(), made_up.networks(), fail_above=limit)
