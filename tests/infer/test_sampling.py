from __future__ import annotations

import json

import pytest
import torch

from shoal.errors import InputError
from shoal.infer.sampling import Sampling, choose, filter_logits, row_generator
from tests.shared import SHARED

LOGITS = torch.tensor([[2.0, 1.0, float("-inf"), 3.0, -1.0, float("-inf")]])


def test_filters_equal_the_published_reference():
    golden = SHARED / "data/megatron/goldens/top_k_top_p.json"
    if not golden.is_file():
        pytest.skip(f"{golden} is not here")
    cases = json.loads(golden.read_text())["cases"]
    checked = 0
    for case in cases:
        given, result = case["inputs"], case["result"].get("ok")
        if result is None:  # the reference fails for k beyond the vocabulary and for two rows with top-p
            continue
        logits = torch.tensor(given["logits"], dtype=torch.float64) / given["temperature"]
        filtered = filter_logits(logits, given["top_k"], given["top_p"])
        kept = [row.isfinite().nonzero().flatten().tolist() for row in filtered]
        assert kept == result["kept"], case["case"]
        for row, columns, expected in zip(filtered, kept, result["probabilities_of_kept"], strict=True):
            assert row.softmax(-1)[columns].tolist() == pytest.approx(expected, rel=1e-5)
        checked += 1
    assert checked == 17


def test_k_beyond_the_vocabulary_keeps_all_and_rows_are_filtered_apart():
    assert torch.equal(filter_logits(LOGITS, 99, 1.0), LOGITS)
    rows = torch.cat((LOGITS, LOGITS.flip(1)))
    both = filter_logits(rows, 0, 0.5)
    assert both.isfinite().nonzero().tolist() == [[0, 3], [1, 2]]


def test_draws_follow_the_probabilities_and_never_take_minus_infinity():
    generators = [row_generator(1, 0, sample) for sample in range(20_000)]
    chosen = choose(LOGITS.expand(20_000, -1), [Sampling()] * 20_000, generators)
    shares = torch.bincount(torch.tensor(chosen), minlength=6) / 20_000
    assert shares.tolist() == pytest.approx(LOGITS.softmax(-1)[0].tolist(), abs=0.015)
    assert shares[2] == shares[5] == 0


def test_a_draw_at_the_very_end_stays_on_the_last_possible_id(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **kind: torch.ones(*size, dtype=torch.float64))
    assert choose(LOGITS, [Sampling()], [row_generator(1, 0, 0)]) == [4]


def test_temperature_sharpens_and_greedy_takes_the_likeliest():
    generators = [row_generator(1, 0, sample) for sample in range(200)]
    assert set(choose(LOGITS.expand(200, -1), [Sampling(temperature=0.05)] * 200, generators)) == {3}
    assert len(set(choose(LOGITS.expand(200, -1), [Sampling(temperature=5.0)] * 200, generators))) == 4
    assert choose(LOGITS, [Sampling(temperature=0)], []) == [3]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -0.1}, "temperature = -0.1 is negative or not finite.*use 0 for the likeliest"),
        ({"temperature": float("inf")}, "temperature = inf is negative or not finite"),
        ({"temperature": float("nan")}, "temperature = nan is negative or not finite"),
        ({"top_k": -1}, "top-k = -1 is negative.*0 for no limit"),
        ({"top_p": 1.5}, "top-p = 1.5 is not above 0 and at most 1"),
        ({"top_p": 0.0}, "top-p = 0.0 is not above 0 and at most 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(InputError, match=f"(?s){said}"):
        Sampling(**settings)


def test_rows_of_one_batch_may_be_drawn_in_different_ways():
    ways = [
        Sampling(temperature=0),
        Sampling(seed=3),
        Sampling(temperature=5.0, seed=4),
        Sampling(top_k=2, seed=5),
    ] * 5
    logits = torch.randn(len(ways), LOGITS.shape[1], generator=torch.Generator().manual_seed(0))

    def drawn(rows):
        generators = [row_generator(ways[row].seed, row, 0) for row in rows]
        return choose(logits[rows], [ways[row] for row in rows], generators)

    together = drawn(list(range(len(ways))))
    assert together == [drawn([row])[0] for row in range(len(ways))]
    assert together != logits.argmax(dim=1).tolist()
