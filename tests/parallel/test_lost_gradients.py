"""A layout that loses gradients is found out at its first step."""

import pytest

from shoal.config import layout_rules
from shoal.config.layout import parse_layout
from tests.pool import RankError
from tests.tiny_dataset import random_dataset
from tests.train.layouts import values_of
from tests.train.ranks import run_training


def train_against_the_rules(run_dir, values):
    rules, layout_rules.RULES = layout_rules.RULES, ()
    try:
        return run_training(run_dir, values)
    finally:
        layout_rules.RULES = rules


def test_gradients_that_a_split_backward_loses_end_the_first_step(pool, tmp_path):
    """Zero-bubble schedules with sharded weights are refused by a rule; without it the guard speaks."""
    layout = parse_layout("pp2+zero_bubble*zero2x2")
    values = values_of(random_dataset(tmp_path / "walk"), layout, "gpt2", train={"global_batch_size": 16})
    with pytest.raises(RankError, match=r"\d+ of \d+ parameters got no gradient, .* the first of them"):
        pool.run(train_against_the_rules, layout.world_size, tmp_path / "run", values)
    assert not (tmp_path / "run/metrics.jsonl").exists()
