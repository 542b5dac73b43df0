"""What is read from a run's metrics: which steps count, and the loss between two validations."""

import pytest

from shoal.bench.measured import measured


def step(number, seconds, loss=5.0, **more):
    return {"step": number, "loss": loss, "seconds": seconds, "communication_s": seconds / 4, **more}


def validation(number, loss):
    return {"step": number, "validation_loss": loss}


def test_start_up_and_warm_up_count_neither_for_time_nor_for_bytes():
    lines = [step(n, 9.0 if n <= 3 else 1.0, sync_bytes=800 if n <= 3 else 100) for n in range(1, 9)]
    found = measured([*lines, validation(8, 4.0)], warmup_steps=3)
    assert (found.seconds_a_step, found.bytes_a_step, found.counted) == (1.0, 100, True)
    assert found.communication_share == pytest.approx(0.25)
    assert found.total_s == 32.0


def test_a_round_now_and_then_is_shared_out_over_its_steps():
    lines = [step(n, 7.0 if n % 4 == 0 else 1.0, sync_bytes=400 if n % 4 == 0 else 0) for n in range(1, 13)]
    found = measured([*lines, validation(12, 4.0)], period=4)
    assert found.seconds_a_step == 2.5  # and not 1, the median step
    assert found.bytes_a_step == 100


def test_where_some_steps_wait_and_others_do_not_all_count_alike():
    lines = [step(n, 9.0 if n in (6, 9) else 1.0) for n in range(1, 13)]
    assert measured([*lines, validation(12, 4.0)], period=0).seconds_a_step == 2.6  # and not 1, the median


def test_the_loss_after_some_seconds_lies_on_a_line_between_validations():
    lines = [step(1, 2.0, loss=8.0), step(2, 2.0), validation(2, 6.0), step(3, 1.0), step(4, 1.0)]
    found = measured([*lines, validation(4, 5.0)])
    assert [(point.step, point.seconds, point.loss) for point in found.curve] == [
        (0, 0.0, 8.0),
        (2, 4.0, 6.0),
        (4, 6.0, 5.0),
    ]
    assert [found.loss_after(seconds) for seconds in (0, 1, 4, 5, 6, 60)] == [8.0, 7.5, 6.0, 5.5, 5.0, 5.0]


def test_bytes_that_nobody_counted_are_by_formula_or_unknown():
    lines = [*(step(n, 1.0) for n in range(1, 6)), validation(5, 4.0)]
    guessed = measured(lines, by_formula=12.5)
    assert (guessed.bytes_a_step, guessed.counted) == (12.5, False)
    assert measured(lines).bytes_a_step is None
