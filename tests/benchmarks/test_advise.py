"""The comparison of advice with measurement: what it makes of two orders."""

import pytest

from benchmarks.advise import ranks, spearman


def test_equal_values_share_the_mean_of_their_places():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1, 3.5, 2]


@pytest.mark.parametrize(
    ("measured", "correlation"),
    [([10, 20, 30, 40], 1.0), ([1, 4, 9, 1e6], 1.0), ([4, 3, 2, 1], -1.0), ([2, 1, 3, 4], 0.8)],
)
def test_only_the_order_counts(measured, correlation):
    assert spearman([0.1, 0.2, 0.3, 0.4], measured) == pytest.approx(correlation)
