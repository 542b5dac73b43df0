"""Chats: the official client, a template as transformers renders it, and templates that mean harm."""

from __future__ import annotations

import json

import httpx2 as httpx
import openai
import pytest
import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference
from transformers import PreTrainedTokenizerFast

from shoal.data.tokenizer import bytes_tokenizer_json, load_tokenizer
from shoal.errors import InputError
from shoal.infer.generate import GeneratedRow
from shoal.infer.load import TextModel
from shoal.infer.sampling import Sampling
from shoal.infer.serve.chat import Chat
from shoal.infer.serve.render import render
from shoal.infer.text import complete
from tests.infer.serving import events, serving
from tests.models.hf import decoder_from_hf, random_gpt2

CHATML = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('who?') }}{% endif -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " naïve <|im_end|>? "},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
END = 258  # <|im_end|>


def folder_of(path, **config):
    """Write a tokenizer of bytes and ChatML's two special tokens, and its configuration."""
    reference = Reference.from_str(bytes_tokenizer_json())
    reference.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")]
    )
    reference.save(str(path / "tokenizer.json"))
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def loaded_from(folder):
    model = decoder_from_hf(random_gpt2(vocab_size=259, n_positions=160))
    return TextModel(model, load_tokenizer(folder), 256, folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return loaded_from(folder_of(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def with_template(tmp_path_factory):
    eos = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    config = {"chat_template": CHATML, "bos_token": "<|endoftext|>", "eos_token": eos, "model_max_length": 9}
    return loaded_from(folder_of(tmp_path_factory.mktemp("template"), **config))


@pytest.fixture(scope="module")
def server(plain):
    with serving(plain) as running:
        yield running


def client_of(running):
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def ask(running, **wish):
    messages = wish.pop("messages", MESSAGES[:2])
    return httpx.post(f"{running.url}/v1/chat/completions", json={"messages": messages, **wish}, timeout=60)


def text_after(loaded, tokens, max_tokens, sampling=Sampling(temperature=0), samples=1):  # noqa: B008
    rows = [GeneratedRow(tokens, max_tokens, sample=n) for n in range(samples)]
    return [one.text for one in complete(loaded, rows, sampling, samples)]


def plain_prompt(loaded):
    return loaded.tokenizer.encode("System: Be brief.\nUser: naïve <|im_end|>?\nAssistant:")


def test_the_official_client_chats_without_a_template(plain, server):
    got = client_of(server).chat.completions.create(
        model="run", messages=MESSAGES[:2], temperature=0, max_completion_tokens=12
    )
    tokens = plain_prompt(plain)
    assert (got.object, got.choices[0].message.role) == ("chat.completion", "assistant")
    assert [one.message.content for one in got.choices] == text_after(plain, tokens, 12)
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(tokens), 12)
    drawn = client_of(server).chat.completions.create(
        model="run", messages=MESSAGES[:2], seed=5, n=3, max_tokens=9
    )
    assert [one.message.content for one in drawn.choices] == text_after(plain, tokens, 9, Sampling(seed=5), 3)


def test_a_streamed_chat_is_the_same_text_in_pieces(plain, server):
    pieces = list(
        client_of(server).chat.completions.create(
            model="run",
            messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, MESSAGES[1]],
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [choice.delta for piece in pieces for choice in piece.choices]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content for delta in deltas) == text_after(plain, plain_prompt(plain), 12)[0]
    assert {piece.object for piece in pieces} == {"chat.completion.chunk"}
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].usage.completion_tokens == 12


def script(running, tokens):
    """Let the model choose these tokens one after the other."""
    rest = iter(tokens)
    engine = running.batcher._engine

    def after(honest):
        def call(given):
            logits = torch.zeros_like(honest(given))
            logits[..., next(rest)] = 1e9
            return logits

        return call

    engine.read, engine.step = after(engine.read), after(engine.step)


def test_without_a_template_the_next_speaker_ends_an_answer(plain):
    with serving(plain) as running:
        script(running, b"Yes.\nUser: more and more")
        got = ask(running, temperature=0).json()["choices"][0]
    assert (got["message"]["content"], got["finish_reason"]) == ("Yes.", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_with_a_template_its_end_of_a_turn_ends_an_answer(with_template, stream):
    with serving(with_template) as running:
        script(running, [*b"Yes.\nUser", END, *b"more"])
        got = ask(running, temperature=0, stream=stream, stop=["Users"])
        choices = (
            [one for event in events(got) for one in event["choices"]] if stream else got.json()["choices"]
        )
    texts = [(one.get("delta") or one["message"])["content"] for one in choices]
    assert ("".join(texts), choices[-1]["finish_reason"]) == ("Yes.\nUser", "stop")


def test_a_prompt_is_what_transformers_makes_of_the_template(with_template, tmp_path):
    theirs = PreTrainedTokenizerFast.from_pretrained(with_template.checkpoint)
    for messages in (MESSAGES, MESSAGES[1:2]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        chat = Chat(with_template.tokenizer, with_template.checkpoint)
        assert chat.tokens(messages) == expected
        assert END in expected
    newer = folder_of(tmp_path, chat_template=[{"name": "default", "template": "no"}])
    assert Chat(load_tokenizer(newer), newer).tokens(MESSAGES) == [*b"no"]
    (newer / "chat_template.jinja").write_text("{{ messages | length }}")
    assert Chat(load_tokenizer(newer), newer).tokens(MESSAGES) == [*b"4"]


def test_the_server_uses_the_template(with_template):
    with serving(with_template) as running:
        got = ask(running, temperature=0, max_tokens=5).json()["choices"][0]
        chat = Chat(with_template.tokenizer, with_template.checkpoint)
        assert [got["message"]["content"]] == text_after(with_template, chat.tokens(MESSAGES[:2]), 5)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 2 s or",
        ),
        ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
        ("{{ 'a' * 2000000 }}", "longer than 1,048,576 characters"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% if %}", "TemplateSyntaxError"),
    ],
)
def test_a_template_that_means_harm_is_an_error(template, said):
    with pytest.raises(InputError, match=f"the chat template of this model .*{said}"):
        render(template, {"messages": MESSAGES})


def test_a_template_has_a_limit_of_time_on_the_clock(monkeypatch):
    monkeypatch.setattr("shoal.infer.serve.render._WALL_S", 0.01)
    with pytest.raises(InputError, match=r"took more than 0\.01 s"):
        render("a", {})


def test_modules_in_the_current_folder_are_not_imported(tmp_path, monkeypatch):
    for name in ("jinja2", "resource"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert render("{{ messages | length }}", {"messages": MESSAGES}) == "4"


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "tokenizer_config.json is not valid JSON"), ('{"chat_template": 7}', "is no text of at most")],
)
def test_a_folder_without_a_usable_template_is_named(plain, tmp_path, content, said):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(InputError, match=said):
        Chat(plain.tokenizer, tmp_path)


def test_a_template_that_is_too_long_is_refused(plain, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("a" * 300_000)
    with pytest.raises(InputError, match="at most 262,144 characters"):
        Chat(plain.tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"messages": []}, 400, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "messages: Input should be 'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages: "),
        ({"messages": [{"role": "user", "content": "a" * 500}]}, 400, "prompt 0 has 517 tokens"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 150}, 400, "together at most 160"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "not valid Unicode"),
        ({"tools": [], "messages": [{"role": "user", "content": "a"}]}, 400, "tools: Extra inputs"),
        ({"model": "x", "messages": [{"role": "user", "content": "a"}]}, 404, "the model 'x' is not here"),
    ],
)
def test_rubbish_in_a_chat_gets_a_sentence(server, body, status, words):
    headers = {"content-type": "application/json"}
    got = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(body), headers=headers)
    assert got.status_code == status, got.text
    assert words in got.json()["error"]["message"]


def test_a_long_chat_gets_what_room_is_left(plain, server):
    prompt = "User: " + "a" * 130 + "\nAssistant:"
    got = ask(server, messages=[{"role": "user", "content": "a" * 130}], temperature=0).json()
    room = 160 - len(prompt)
    assert got["usage"]["completion_tokens"] == room
    assert [got["choices"][0]["message"]["content"]] == text_after(
        plain, plain.tokenizer.encode(prompt), room
    )


def test_health_needs_no_token_and_tokens_of_a_prompt_are_counted(plain):
    with serving(plain, token="a-long-random-word") as running:
        health = httpx.get(f"{running.url}/health")
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        assert httpx.post(f"{running.url}/tokenize", json={"prompt": "a"}).status_code == 401
        headers = {"authorization": "Bearer a-long-random-word"}
        for prompt, tokens in (("naïve", [*"naïve".encode()]), ("", [256])):
            got = httpx.post(f"{running.url}/tokenize", json={"prompt": prompt}, headers=headers)
            assert got.json() == {"count": len(tokens), "max_model_len": 160, "tokens": tokens}
