"""What a log step, a sample and the summary look like on the console: widths, and what is unusual."""

import pytest

from shoal.train import console
from shoal.train.clock import PHASES

USUAL = {
    **{f"{name}_ms": 10.0 for name in PHASES},
    **{f"{name}_bytes": 1e9 for name in ("allocated", "peak", "reserved", "least_peak")},
    "step": 30,
    "step_ms": 100.0,
    "loss": 2.0,
    "lr": 1e-3,
    "grad_norm": 1.0,
    "tokens_per_s": 1234.0,
    "loss_scale": 1.0,
    "skipped": 0,
    "mfu": None,
    "mfu_measured": 0.5,
    "left": "0:02",
    "most_busy_ms": 60.0,
    "most_busy_ms_rank": 3,
    "least_busy_ms": 40.0,
    "least_busy_ms_rank": 0,
    "most_peak_bytes": 3e9,
    "most_peak_bytes_rank": 1,
}


def shown(before=USUAL, steps=2000, **changed):
    return console.step_lines(USUAL | changed, before, steps, "tokens").splitlines()


def test_a_usual_step_is_one_line():
    assert shown() == ["step   30/2000  loss 2.0000  lr 1.00e-03  1,234 tokens/s  0:02 left"]


def test_a_line_of_the_longest_run_fits_80_columns():
    large = {"step": 999_999, "loss": 12.3456, "left": "99:59:59"}
    for rate in (999_999.4, 123_456_789.0):
        (line,) = shown(steps=1_000_000, tokens_per_s=rate, **large)
        assert len(line) <= 80
    assert "123.46M tokens/s" in line
    (line,) = shown(loss=float("nan"))
    assert "loss nan" in line
    assert "loss 1.23e+06" in shown(loss=1_234_567.8)[0]


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        ({"skipped": 3}, "  3 steps skipped, 3 in all"),
        ({"loss_scale": 512.0}, "  loss scale 512 (was 1)"),
        ({"data_ms": 35.0}, "  35% of the step is waiting for data"),
        ({"most_busy_ms": 90.0}, "  rank 3 computes 90 ms a step, rank 0 40 ms"),
    ],
)
def test_what_is_unusual_stands_below_the_line_once(changed, note):
    assert shown(**changed)[1:] == [note]
    if changed.keys() & {"skipped", "loss_scale"}:  # as it was at the line before
        assert shown(before=USUAL | changed, **changed)[1:] == []


def test_the_first_line_of_a_start_is_compared_with_nothing_but_tells_what_was_skipped():
    assert shown(before={}, data_ms=90.0, most_busy_ms=90.0, loss_scale=65536.0)[1:] == []
    assert shown(before={}, skipped=1)[1:] == ["  1 step skipped, 1 in all"]


def test_details_have_memory_phases_and_ranks_in_120_columns():
    lines = console.details(USUAL | {f"{name}_ms": 12.5 for name in PHASES}, 8).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[1] == "  gradient norm 1.000, MFU 50% of matmul, memory 1.00/1.00/1.00 GB"
    assert lines[2] == "  by rank: peak 1.00 to 3.00 GB (most: 1), busy 40 to 60 ms (most: 3)"
    assert "bubble" in lines[0]
    alone = console.details(USUAL | {"mfu": 0.25, "tp_ms": 0.0, "bubble_ms": 0.0, "shard_ms": 0.0}, 1)
    assert "MFU 25% of peak" in alone
    assert not {"by rank", "tp", "bubble", "shard"} & set(alone.replace(":", "").split())


def test_rows_are_wrapped_beside_their_names_and_paths_stay_whole():
    path = "/a/" + "long/" * 20
    rows = [("schedule", "word " * 30), ("data", path)]
    first, second, *_, last = console.table(rows, verbose=False).splitlines()
    assert first.startswith("  schedule     word word")
    assert second.startswith(" " * 15 + "word")
    assert max(len(first), len(second)) <= 80
    assert last.strip() == path
    assert max(map(len, console.table(rows[:1], verbose=True).splitlines())) in range(110, 121)


def test_a_sample_is_harmless_and_fits():
    first, *lines = console.text_sample(5, "Once\n\nupon a time\x1b[2J\a" + "x" * 200).splitlines()
    assert first == "step 5: sample"
    assert lines[0].startswith("  Once upon a time\ufffd[2J\ufffdxxx")
    assert all(line.isprintable() and len(line) <= 80 for line in lines)
    assert "\x1b" not in "".join(lines)
    assert max(len(line) for line in console.text_sample(5, "狼" * 99).splitlines()) == 40  # 80 columns


def test_paths_below_the_current_folder_are_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert console.short_path(tmp_path / "runs/first") == "runs/first"
    assert console.short_path("/elsewhere/run") == "/elsewhere/run"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3_723, "1:02:03"), (359_999, "99:59:59"), (864_000, "10.0 days")],
)
def test_durations(seconds, text):
    assert console.duration(seconds) == text
