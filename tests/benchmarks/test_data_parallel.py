"""The bounds of the benchmark of two processes beside two threads."""

import pytest

from benchmarks.data_parallel import shortfalls


@pytest.mark.parametrize(
    ("fp32", "bf16", "held", "missed"),
    [(1.0, 0.95, 1.0, 0), (0.99, None, 0.5, 1), (1.2, 0.94, 0.5, 1), (1.2, None, 1.01, 1), (0.9, 0.9, 2, 3)],
)
def test_a_missed_bound_is_told(fp32, bf16, held, missed):
    ratios = {"fp32": fp32, "bf16": bf16}
    figures = {name: {"ratio_2x1_to_1x2": ratio} for name, ratio in ratios.items() if ratio is not None}
    assert len(shortfalls({"save": {"worst_hold_in_steps": held}, **figures})) == missed
