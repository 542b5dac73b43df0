"""Where the time of a step goes under each axis, and which rank is the slow one."""

import time

import pytest
import torch.distributed as dist

from shoal.config.layout import parse_layout, settings_of
from tests.cases import every
from tests.train.ranks import run_training, tiny_config

SLEEP_S = 0.04  # a micro-batch, on the slow rank
STEPS = 6


def run_with_a_slow_rank(run_dir, values):
    """Train; rank 1 sleeps in every forward pass."""
    from shoal.tasks.gpt import Gpt

    honest = Gpt.forward_loss

    def run(self, model, micro, inputs=None):
        if dist.get_rank() == 1:
            time.sleep(SLEEP_S)
        return honest(self, model, micro, inputs)

    Gpt.forward_loss = run
    try:
        return run_training(run_dir, values)
    finally:
        Gpt.forward_loss = honest


@pytest.mark.parametrize(
    ("words", "waits", "idle"),
    every(
        2,
        [
            ("zero3x2", "shard", ("tp", "bubble")),
            ("dp2", "communication", ("tp", "shard", "bubble")),
            ("pp2", "bubble", ("tp", "shard")),
            ("tp2", "tp", ("shard", "bubble")),
        ],
    ),
)
def test_waiting_for_a_slow_rank_is_the_time_of_its_axis(pool, data, tmp_path, words, waits, idle):
    train = {"steps": STEPS, "log_every": STEPS}  # ranks are told apart by all but the first step together
    values = tiny_config(data, parallel=settings_of(parse_layout(words)), train=train)
    lines = pool.run(run_with_a_slow_rank, 2, tmp_path, values)[0]["lines"]
    steps = [line for line in lines if "loss" in line][1:]
    micro_steps = 2 if words == "dp2" else 4  # of 4 sequences, of 16
    slept_s = len(steps) * micro_steps * SLEEP_S
    for name in idle:
        assert all(line[f"{name}_s"] == 0.0 for line in steps), name
    waited_s = sum(line[f"{waits}_s"] for line in steps)  # rank 0's
    whole_s = sum(line["seconds"] for line in steps)
    assert 0.5 * slept_s < waited_s < whole_s
    told = steps[-1]  # a step on average, from the second to this one
    assert (told["most_busy_ms_rank"], told["least_busy_ms_rank"]) == (1, 0)
    assert told["most_busy_ms"] > told["least_busy_ms"] + 1e3 * SLEEP_S
    assert told["peak_bytes"] >= told["most_peak_bytes"] >= told["least_peak_bytes"] > 0
