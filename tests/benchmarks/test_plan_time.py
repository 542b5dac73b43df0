"""The order of predictions beside that of measurements."""

import pytest

from benchmarks.plan_time import rank_correlation


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], (1.0, 3)),
        ([3, 2, 1], [10, 20, 30], (-1.0, 3)),
        ([2, 1, 3], [10, 10.5, 30], (1.0, 2)),  # two that are measured alike have no order
        ([1, 1, 3], [10, 20, 30], (2 / 3, 3)),  # two that are predicted alike are half right
    ],
)
def test_only_pairs_that_differ_by_a_tenth_count(predicted, measured, expected):
    rows = {
        str(n): {"predicted_s": p, "measured_s": m}
        for n, (p, m) in enumerate(zip(predicted, measured, strict=True))
    }
    assert rank_correlation(rows) == pytest.approx(expected)
