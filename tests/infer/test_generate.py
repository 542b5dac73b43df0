from __future__ import annotations

import pytest
import torch

from shoal.errors import InputError
from shoal.infer.generate import (
    DecodingBatch,
    Engine,
    GeneratedRow,
    _announce_sliding,
    generate,
    tokens_that_fit,
)
from shoal.infer.sampling import Sampling
from shoal.models.cache import KVCache
from tests.models.hf import decoder_from_hf, random_gpt2, random_llama

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [60, 59]]
STYLES = pytest.mark.parametrize("make", [random_gpt2, random_llama])


def continuations(model, rows, sampling=GREEDY, stop_id=None):
    out = [[] for _ in rows]
    for row, token in generate(model, rows, sampling, stop_id):
        out[row].append(token)
    return out


def rows_of(prompts, max_tokens=12):
    return [GeneratedRow(prompt, max_tokens, prompt=number) for number, prompt in enumerate(prompts)]


@STYLES
def test_greedy_equals_transformers_and_generation_without_a_cache(make):
    reference = make()
    model = decoder_from_hf(reference)
    for prompt in PROMPTS:
        ours = continuations(model, [GeneratedRow(prompt, 20)])[0]
        theirs = reference.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0, use_cache=True
        )
        assert ours == theirs[0, len(prompt) :].tolist()
        tokens = list(prompt)
        for _ in range(20):
            tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
        assert ours == tokens[len(prompt) :]


@STYLES
def test_cached_logits_equal_whole_ones_for_any_cut(make):
    model = decoder_from_hf(make())
    tokens = torch.randint(0, 61, (2, 30), generator=torch.Generator().manual_seed(3))
    whole = model(tokens)
    cache = KVCache(model.shape, 2, 30, torch.float32)
    parts = [model(piece, cache=cache.part(0, 2)) for piece in tokens.split([7, 1, 12, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=5e-6, rtol=0)


@STYLES
def test_rows_of_unequal_length_see_their_own_tokens_only(make):
    model = decoder_from_hf(make())
    tokens = torch.randint(0, 61, (3, 20), generator=torch.Generator().manual_seed(3))
    cache, lengths = KVCache(model.shape, 4, 30, torch.float32), (7, 12, 3)
    for row, length in enumerate(lengths):
        model(tokens[row : row + 1, :length], cache=cache.part(row, 1))
    cache.move(2, 0)  # the first one ends, the last one takes its place
    rows, lengths = (2, 1), (3, 12)
    for step in range(5):
        given = torch.stack([tokens[row, length + step] for row, length in zip(rows, lengths, strict=True)])
        got = model(given[:, None], cache=cache.part(0, 2))
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            expected = model(tokens[row : row + 1, : length + step + 1])[:, -1]
            torch.testing.assert_close(got[place], expected, atol=5e-6, rtol=0)
    assert cache.lengths[:2] == [8, 17]


def test_a_long_prompt_is_read_in_parts(monkeypatch):
    model = decoder_from_hf(random_gpt2())
    whole = continuations(model, [GeneratedRow(list(range(20)), 8)])
    monkeypatch.setattr("shoal.infer.generate._PREFILL", 6)
    assert continuations(model, [GeneratedRow(list(range(20)), 8)]) == whole


@STYLES
def test_a_batch_of_unequal_prompts_equals_each_alone(make):
    model = decoder_from_hf(make())
    for sampling in (GREEDY, Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=4)):
        together = continuations(model, rows_of(PROMPTS), sampling)
        alone = [continuations(model, [row], sampling)[0] for row in rows_of(PROMPTS)]
        assert together == alone


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=8)])
def test_rows_that_end_early_leave_the_others_as_they_are(sampling):
    model = decoder_from_hf(random_gpt2())
    full = continuations(model, rows_of(PROMPTS, 20), sampling)
    stop_id = full[2][5]
    rows = [GeneratedRow(PROMPTS[n], limit, prompt=n) for n, limit in enumerate((3, 20, 20, 9))]
    stopped = continuations(model, rows, sampling, stop_id)
    for row, got, unstopped in zip(rows, stopped, full, strict=True):
        expected = unstopped[: row.max_tokens]
        assert got == expected[: expected.index(stop_id) if stop_id in expected else None]
    assert len({len(row) for row in stopped}) > 1


def test_the_longest_row_may_use_the_last_position_and_short_rows_go_on_after_it_stopped():
    model = decoder_from_hf(random_gpt2())
    long, short = list(range(30)), [7]
    expected = continuations(model, [GeneratedRow(short, 31)])
    assert continuations(model, [GeneratedRow(long, 2), GeneratedRow(short, 31)])[1] == expected[0]


def test_samples_differ_by_seed_prompt_and_number_only():
    model = decoder_from_hf(random_gpt2())
    rows = [GeneratedRow([5, 9], 8, prompt=0, sample=n) for n in range(5)] + [
        GeneratedRow([5, 9], 8, prompt=1)
    ]
    first = continuations(model, rows, Sampling(seed=1, temperature=3.0))
    assert first == continuations(model, rows, Sampling(seed=1, temperature=3.0))
    assert len({tuple(row) for row in first}) == 6
    assert first != continuations(model, rows, Sampling(seed=2, temperature=3.0))


def test_a_padded_id_is_never_drawn():
    model = decoder_from_hf(random_gpt2(), pad_multiple=1024)
    rows = [GeneratedRow([5], 30, sample=n) for n in range(20)]
    drawn = {token for row in continuations(model, rows, Sampling(temperature=100.0)) for token in row}
    assert max(drawn) < 61
    assert len(drawn) > 50


@STYLES
def test_what_does_not_fit_the_positions_slides_or_is_rejected_on_request(make, caplog):
    shape = decoder_from_hf(make()).shape
    _announce_sliding.cache_clear()
    assert tokens_that_fit(shape, 10, 22, strict=True) == tokens_that_fit(shape, 10, 22) == 22
    assert tokens_that_fit(shape, 10, None, strict=True) == 22
    assert caplog.messages == []
    assert tokens_that_fit(shape, 10, None) == tokens_that_fit(shape, 40, None) == 256
    assert [message.split(";")[0] for message in caplog.messages] == [
        "note: prompt and new tokens exceed the model's 32 positions"
    ]
    with pytest.raises(InputError, match=r"(?s)10 tokens and 23 new ones.* 32 positions.*--max-tokens 22"):
        tokens_that_fit(shape, 10, 23, strict=True)
    with pytest.raises(InputError, match=r"(?s)prompt of 32 tokens.*shorten the prompt"):
        tokens_that_fit(shape, 32, None, strict=True)


def sliding_logits(model, prompt, steps):
    """Return the logits before each greedy token, each of a fresh pass over the window, which holds 32."""
    window, found = prompt[-32:], []
    for _ in range(steps):
        found.append(model(torch.tensor([window]))[0, -1])
        window = (window[-15:] if len(window) == 32 else window) + [found[-1].argmax().item()]
    return torch.stack(found)


@STYLES
def test_after_a_slide_the_next_token_follows_from_the_kept_window_alone(make, monkeypatch):
    monkeypatch.setattr("shoal.infer.generate._PREFILL", 6)  # the kept half is read in parts, too
    model = decoder_from_hf(make())
    prompts = [[5, 9, 2], list(range(31)), list(range(60, 20, -1)), list(range(32))]
    batch, made = DecodingBatch(Engine(model, 4, 32), None), [[] for _ in prompts]
    for number, row in enumerate(rows_of(prompts, 70)):
        list(batch.add(number, row, GREEDY))
    while batch:
        for number, logits in enumerate(torch.cat(batch._logits_bv)):
            made[number].append(logits)
        batch.advance()
    for prompt, logits in zip(prompts, made, strict=True):
        torch.testing.assert_close(torch.stack(logits), sliding_logits(model, prompt, 70), atol=5e-6, rtol=0)


def test_rows_that_slide_leave_those_beside_them_as_they_are():
    model = decoder_from_hf(random_gpt2())
    rows = [GeneratedRow(prompt, n, prompt=n) for prompt, n in zip(PROMPTS, (80, 5, 40, 30), strict=True)]
    sampling = Sampling(temperature=0.8, seed=4)
    assert continuations(model, rows, sampling) == [continuations(model, [row], sampling)[0] for row in rows]


def test_a_model_of_one_position_slides_to_each_new_token():
    model = decoder_from_hf(random_gpt2(n_positions=1))
    (made,) = continuations(model, [GeneratedRow([5, 9], 4)])
    tokens = [9]
    for _ in range(4):
        tokens.append(model(torch.tensor([tokens[-1:]]))[0, -1].argmax().item())
    assert made == tokens[1:]


@STYLES
@pytest.mark.parametrize("gone", [0, 1])
def test_a_row_may_leave_while_a_prompt_is_read_in_parts(make, gone, monkeypatch):
    monkeypatch.setattr("shoal.infer.generate._PREFILL", 4)
    model = decoder_from_hf(make())
    rows = [
        GeneratedRow([5, 9, 2], 20),
        GeneratedRow([7], 20, prompt=1),
        GeneratedRow([1, 2, 3, 4, 5, 6, 7, 8, 9], 6, prompt=2),
    ]
    batch = DecodingBatch(Engine(model, 3, 30), None)
    for number in (0, 1):
        assert list(batch.add(number, rows[number], GREEDY)) == [len(rows[number].tokens)]
    for _ in range(3):
        batch.advance()
    reading = batch.add(2, rows[2], GREEDY)
    assert next(reading) == 4
    batch.drop(gone)
    batch.advance()
    assert list(reading) == [4, 1]
    made = {0: [], 1: [], 2: []}
    while batch:
        for number, token in batch.advance():
            made[number].append(token)
    assert made[2] == [*continuations(model, [rows[2]])[0], None]
    kept = 1 - gone
    assert made[kept] == [*continuations(model, [rows[kept]])[0][4:], None]
    assert made[gone] == []
