from __future__ import annotations

import pytest
import torch

from shoal.data.tokenizer import bytes_tokenizer_json, parse_tokenizer
from shoal.errors import InputError
from shoal.infer.load import TextModel
from shoal.infer.sampling import Sampling
from shoal.infer.text import complete, prompt_rows, stream
from tests.models.hf import decoder_from_hf, random_gpt2

BYTES = parse_tokenizer(bytes_tokenizer_json().encode(), "bytes")
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    model = decoder_from_hf(random_gpt2(vocab_size=257, n_positions=64))
    return TextModel(model, BYTES, 256, tmp_path_factory.mktemp("checkpoint"))


def script(monkeypatch, tokens):
    """Let the model say `tokens`, whatever it is asked."""
    monkeypatch.setattr("shoal.infer.load.generate", lambda *_: ((0, token) for token in tokens))


@pytest.mark.parametrize("text", ["naïve", "鱼群 shoal", "🐟🐠 e\u0301", "👩‍👩‍👧‍👦"])
def test_a_stream_never_shows_half_a_character(loaded, monkeypatch, text):
    script(monkeypatch, text.encode())
    pieces = list(stream(loaded, prompt_rows(loaded, "x")[0], GREEDY))
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) == len(text)
    assert "\ufffd" not in "".join(pieces)


def test_what_the_limit_cuts_in_half_is_left_out(loaded, monkeypatch):
    for cut in (1, 2, 3):
        script(monkeypatch, "a🐟".encode()[: 1 + cut])
        row = prompt_rows(loaded, "x", max_tokens=1 + cut)[0]
        assert "".join(stream(loaded, row, GREEDY)) == "a"
        assert next(complete(loaded, [row], GREEDY, 1)).text == "a"


def test_stream_and_batches_give_the_same_text(loaded):
    prompts = ["fish", "", "a longer prompt"]
    rows = [
        row
        for n, text in enumerate(prompts)
        for row in prompt_rows(loaded, text, number=n, samples=2, max_tokens=20)
    ]
    sampling = Sampling(seed=3)
    texts = ["".join(stream(loaded, row, sampling)) for row in rows]
    for batch_size in (1, 4, 16):
        assert [done.text for done in complete(loaded, rows, sampling, batch_size)] == texts
    assert len(set(texts)) == 6


def test_a_completion_says_why_it_ended(loaded):
    row = prompt_rows(loaded, "fish", max_tokens=10)[0]
    done = next(complete(loaded, [row], GREEDY, 1))
    assert (done.num_tokens, done.finish) == (10, "length")
    with torch.no_grad():
        last = torch.tensor([row.tokens])
        likeliest = loaded.model(last)[0, -1].argmax().item()
    ending = TextModel(loaded.model, BYTES, likeliest, loaded.checkpoint)
    done = next(complete(ending, [row], GREEDY, 1))
    assert (done.text, done.num_tokens, done.finish) == ("", 0, "eod")


def test_an_empty_prompt_starts_a_document_and_a_long_one_is_refused_on_request(loaded):
    assert prompt_rows(loaded, "")[0].tokens == [256]
    assert len(prompt_rows(loaded, "x" * 70)[0].tokens) == 70
    with pytest.raises(InputError, match="a prompt of 70 tokens"):
        prompt_rows(loaded, "x" * 70, strict=True)
