from __future__ import annotations

import numpy as np
import pytest

from shoal.data.prepare.options import PrepareOptions, parse_split
from shoal.data.prepare.splits import allocate, plan_split
from shoal.errors import ConfigError, DataError

SHARES = (0.949, 0.05, 0.001)


@pytest.mark.parametrize("documents", [1, 3, 4, 10, 50, 499, 500, 501, 1000, 1999, 2000, 3000])
def test_splits_are_disjoint_cover_everything_and_none_is_empty(documents):
    plan = plan_split(documents, documents * 7000, SHARES, seed=1, text="949,50,1")
    if plan.by == "documents":
        of = plan.of_documents(0, documents)
        counts = np.bincount(of, minlength=3)
    else:
        ends = plan.of_tokens()
        assert ends[-1][1] == documents * 7000
        counts = np.zeros(3, int)
        for (split, end), before in zip(ends, [0, *(end for _, end in ends)], strict=False):
            counts[split] += end - before
    assert counts.min() > 0
    assert tuple(counts) == plan.counts
    total = counts.sum()
    assert abs(counts - np.array(SHARES) * total).max() <= 1


def test_few_documents_are_split_by_tokens():
    assert plan_split(499, 10_000, SHARES, 1, "").by == "tokens"
    assert plan_split(1000, 10_000, SHARES, 1, "").by == "documents"
    assert plan_split(3, 10_000, (1 / 3, 1 / 3, 1 / 3), 1, "").by == "documents"


def test_a_document_keeps_its_split_however_they_are_asked_for():
    plan = plan_split(1000, 10_000, SHARES, 7, "")
    parts = np.concatenate([plan.of_documents(first, 250) for first in range(0, 1000, 250)])
    assert (parts == plan.of_documents(0, 1000)).all()


def test_the_seed_chooses():
    one, two = (plan_split(1000, 10_000, SHARES, seed, "").of_documents(0, 1000) for seed in (1, 2))
    assert (one != two).any()
    first, second = (plan_split(1, 10_000, SHARES, seed, "").of_tokens() for seed in (1, 2))
    assert first != second


def test_too_few_tokens_say_what_each_split_would_need():
    with pytest.raises(
        DataError, match=r"train \d+, validation \d+, test 0 tokens; each needs at least 2"
    ) as error:
        plan_split(3, 120, SHARES, 1, "949,50,1")
    assert "takes 2,000 tokens in all" in error.value.message


@pytest.mark.parametrize("total", [0, 1, 7, 1000, 10**12])
def test_allocation_sums_to_the_total(total):
    assert sum(allocate(total, SHARES)) == total


def test_a_split_is_read_as_weights():
    assert parse_split("949,50,1") == (949, 50, 1)
    assert parse_split("9/1") == (9, 1, 0)
    assert parse_split("1") == (1, 0, 0)


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0", "nan,1", "inf,1"])
def test_an_odd_split_is_a_sentence(text):
    with pytest.raises(ConfigError, match="--split"):
        parse_split(text)


def test_separate_files_take_the_place_of_a_share(tmp_path):
    options = PrepareOptions(("a",), tmp_path, validation=("v",))
    assert options.shares == pytest.approx((949 / 950, 0, 1 / 950))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": 100}, "--vocab-size 100 is not between 257"),
        ({"vocab_size": 300, "tokenizer": "gpt2"}, "with --tokenizer gpt2: that vocabulary is fixed"),
        ({"split": "0,1"}, "leaves no training data"),
        ({"delim": "||"}, "not one character"),
        ({"delim": "\\n\\t"}, "not one character"),
        ({"separator": ""}, "--separator is empty"),
        ({"limit": 0}, "--limit 0 is below 1"),
        ({"workers": 0}, "--workers 0 is below 1"),
        ({"max_rejected_share": 2.0}, "is not a share"),
    ],
)
def test_an_option_that_cannot_be_is_a_sentence(tmp_path, changes, text):
    with pytest.raises(ConfigError, match=text):
        PrepareOptions(("a",), tmp_path, **changes)


def test_a_shells_backslash_n_is_a_newline(tmp_path):
    options = PrepareOptions(("a",), tmp_path, separator="\\n\\n", delim="\\t")
    assert (options.separator, options.delim) == ("\n\n", "\t")
