"""Half precision under every layout: the same curve but for rounding, the same verdicts on all ranks."""

import numpy as np
import pytest

from shoal.config.layout import parse_layout
from shoal.train.loop import train
from shoal.train.metrics import read_metrics
from tests.cases import every
from tests.train.layouts import values_of
from tests.train.ranks import make_job, run_training

BF16_LAYOUTS = ("zero3x2", "dp2", "zero1x2", "zero2x2", "tp2", "tp2+sp", "pp2", "pp2+zero_bubble", "dp2*tp2")
BF16_LAYOUTS += ("dp2*zero3x2", "pp2+interleaved", "zero3x2*tp2+sp", "pp2*tp2", "pp2*zero2x2")
FP16_LAYOUTS = ("zero3x2", "tp2+sp", "pp2*tp2", "pp2", "dp2*zero2x2")
# At this scale the first steps overflow, which uses up the hysteresis and then halves it until they do not.
FP16 = {"dtype": "fp16", "initial_scale": 2.0**22, "hysteresis": 2, "scale_window": 3}


def learning(data, words, **sections):
    """Return values of a run that learns in its few steps."""
    values = values_of(data, parse_layout(words), "gpt2", train={"steps": 8}, **sections)
    return values | {"optimizer": {"lr": 1e-2}}


@pytest.fixture(scope="module")
def exact(pool, data, tmp_path_factory):
    return pool.run(run_training, 1, tmp_path_factory.mktemp("fp32"), learning(data, "1"))[0]


@pytest.mark.parametrize("words", every(7, BF16_LAYOUTS))
def test_bf16_learns_under_every_layout(pool, data, exact, tmp_path, words):
    values = learning(data, words, precision={"dtype": "bf16"})
    ranks = pool.run(run_training, parse_layout(words).world_size, tmp_path, values)
    losses = ranks[0]["losses"]
    assert losses[-1] < losses[0] - 0.05
    assert losses != exact["losses"]
    np.testing.assert_allclose(losses, exact["losses"], rtol=2e-3)
    for rank in ranks:
        assert {weight.dtype for weight in rank["weights"].values()} == {np.dtype("float32")}


def verdicts(run_dir, values):
    """Train; return what this rank came to think of each step, and what rank 0 wrote down."""
    job = make_job(run_dir, values)
    seen = []
    update = job.precision.scaler.update

    def note(overflow):
        left_out = update(overflow)
        seen.append((overflow, left_out, job.precision.scaler.scale))
        return left_out

    job.precision.scaler.update = note
    train(job)
    return seen, job.skipped, read_metrics(run_dir / "metrics.jsonl")


@pytest.fixture(scope="module")
def half(pool, data, tmp_path_factory):
    return pool.run(verdicts, 1, tmp_path_factory.mktemp("fp16"), learning(data, "1", precision=FP16))[0]


@pytest.mark.parametrize("words", every(3, FP16_LAYOUTS))
def test_all_ranks_agree_on_overflows_and_on_the_scale(pool, data, half, tmp_path, words):
    values = learning(data, words, precision=FP16)
    layout = parse_layout(words)
    ranks = pool.run(verdicts, layout.world_size, tmp_path, values)
    seen, _, lines = half
    own, own_skipped, own_lines = ranks[0]
    assert all(rank[:2] == (own, own_skipped) for rank in ranks)
    assert 0 < own_skipped < 7
    # Tensor ranks add fp16 products in another order, so that what is close to the limit may pass it.
    alike = next((n for n, pair in enumerate(zip(own, seen, strict=True)) if pair[0] != pair[1]), len(seen))
    assert alike >= (len(seen) if layout.tp == 1 else 2)
    losses, expected = ([line["loss"] for line in some if "loss" in line] for some in (own_lines, lines))
    np.testing.assert_allclose(losses[: alike + 1], expected[: alike + 1], rtol=2e-3)
