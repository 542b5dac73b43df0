"""`shoal serve`, by the official client, by rubbish, and by clients that do not behave."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
import torch

from shoal.cli_models import serve
from shoal.errors import InputError
from shoal.infer.load import load_text_model
from shoal.infer.sampling import Sampling
from shoal.infer.serve.server import Address, Limits
from shoal.infer.text import Writer, complete, prompt_rows
from tests import commands
from tests.infer.serving import events, serving

GREEDY = Sampling(greedy=True)


@pytest.fixture(scope="module")
def loaded(trained_run):
    return load_text_model(trained_run, torch.device("cpu"))


@pytest.fixture(scope="module")
def server(loaded):
    with serving(loaded) as running:
        yield running


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def text_of(loaded, prompt, sampling=GREEDY, max_tokens=16, samples=1):
    rows = prompt_rows(loaded, prompt, samples=samples, max_tokens=max_tokens)
    return [one.text for one in complete(loaded, rows, sampling, 16)]


def test_the_official_client_gets_what_generate_writes(loaded, client):
    assert [model.id for model in client.models.list()] == ["run"]
    assert client.models.retrieve("run").owned_by == "shoal"
    got = client.completions.create(model="run", prompt="ab", temperature=0)
    assert got.object == "text_completion"
    assert [choice.text for choice in got.choices] == text_of(loaded, "ab")
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (2, 16, 18)
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=5)
    drawn = client.completions.create(
        model="run", prompt="ab", temperature=0.7, top_p=0.9, seed=5, n=3, max_tokens=9
    )
    assert [choice.text for choice in drawn.choices] == text_of(loaded, "ab", sampling, 9, 3)
    assert [choice.index for choice in drawn.choices] == [0, 1, 2]


def test_prompts_may_be_several_texts_or_token_ids(loaded, client):
    alone = [text_of(loaded, prompt)[0] for prompt in ("ab", "c", "")]
    together = client.completions.create(model="run", prompt=["ab", "c", ""], temperature=0)
    assert [choice.text for choice in together.choices] == alone
    ids = [loaded.tokenizer.encode("ab"), loaded.tokenizer.encode("c")]
    by_ids = client.completions.create(model="run", prompt=ids, temperature=0)
    assert [choice.text for choice in by_ids.choices] == alone[:2]
    one = client.completions.create(model="run", prompt=ids[0], temperature=0, echo=True)
    assert one.choices[0].text == "ab" + alone[0]


def test_a_stream_is_the_same_text_in_pieces(loaded, client, server):
    options = {"include_usage": True}
    pieces = list(
        client.completions.create(
            model="run", prompt="ab", temperature=0, stream=True, echo=True, stream_options=options
        )
    )
    assert len(pieces) > 3
    assert (
        "".join(choice.text for piece in pieces for choice in piece.choices)
        == "ab" + text_of(loaded, "ab")[0]
    )
    assert [choice.finish_reason for piece in pieces for choice in piece.choices][-1] == "length"
    assert pieces[-1].usage.completion_tokens == 16
    assert len({piece.id for piece in pieces}) == 1
    several = events(server.post(prompt=["ab", "c"], temperature=0, stream=True))
    for index, prompt in enumerate(("ab", "c")):
        own = [one for event in several for one in event["choices"] if one["index"] == index]
        assert "".join(one["text"] for one in own) == text_of(loaded, prompt)[0]


def test_a_stop_text_ends_a_completion_before_it(loaded, server):
    whole = text_of(loaded, "ab", max_tokens=40)[0]
    stop = whole[7:10]
    before = whole[: whole.index(stop)]
    got = server.post(prompt="ab", temperature=0, max_tokens=40, stop=[stop, "\u2603"]).json()["choices"][0]
    assert (got["text"], got["finish_reason"]) == (before, "stop")
    streamed = events(server.post(prompt="ab", temperature=0, max_tokens=40, stop=stop, stream=True))
    assert "".join(event["choices"][0]["text"] for event in streamed) == before


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["ab", "cd", "ef"], ["cde"], ["ab", "", ""]),
        (["ab", "cd", "xf"], ["cde"], ["ab", "", "cdxf"]),
        (["aa", "aa", "b"], ["aab"], ["", "aa", ""]),
        (["abc"], ["c", "bc"], ["a"]),
        (["a", "b"], [""], ["a", "b"]),
    ],
)
def test_text_that_may_begin_a_stop_is_held_back(pieces, stops, expected):
    class Pieces:  # a tokenizer whose ids are the numbers of pieces
        def stream(self):
            return self

        def push(self, number):
            return pieces[number]

        def flush(self):
            return ""

    writer = Writer(Pieces(), [], stops)
    assert [writer.push(number) for number in range(len(pieces))] == expected
    assert writer.end() == ""


def test_requests_that_come_together_each_get_their_own_text(loaded, server):
    prompts = [f"{chr(97 + n % 26)}{n}" for n in range(64)]
    alone = [text_of(loaded, prompt, Sampling(seed=n), 5 + n % 30)[0] for n, prompt in enumerate(prompts)]

    def ask(n):
        time.sleep(0.01 * (n % 7))
        return server.post(prompt=prompts[n], seed=n, max_tokens=5 + n % 30).json()

    with ThreadPoolExecutor(64) as clients:
        answers = list(clients.map(ask, range(64)))
    assert [answer["choices"][0]["text"] for answer in answers] == alone
    assert len({answer["id"] for answer in answers}) == 64


RUBBISH = [
    ({"prompt": "a", "max_tokens": -3}, 400, "max_tokens: Input should be greater than or equal to 1"),
    (
        {"prompt": "a", "max_tokens": 10_000},
        400,
        "prompt 0 has 1 tokens and max_tokens is 10000: together at most",
    ),
    ({"prompt": "a" * 500}, 400, "prompt 0 has 500 tokens"),
    ({"prompt": "a", "n": 100}, 400, "n: Input should be less than or equal to 64"),
    ({"prompt": ["a"] * 40, "n": 2}, 400, "40 prompts with n = 2: at most 64 texts a request"),
    ({"prompt": 7}, 400, "prompt: "),
    ({"prompt": []}, 400, "prompt: "),
    ({"prompt": [3, 70_000]}, 400, "prompt 0 has the token 70000: there are 257"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p: Input should be greater than 0"),
    (
        {"prompt": "a", "logprobs": 3},
        400,
        "logprobs: Value error, this server does not do that; leave it out",
    ),
    ({"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty: Value error"),
    ({"prompt": "a", "tempertaure": 1}, 400, "tempertaure: Extra inputs are not permitted"),
    ({"prompt": "a", "stop": ["a"] * 5}, 400, "stop: "),
    ({"prompt": "a", "model": "gpt-4"}, 404, "the model 'gpt-4' is not here; this server has 'run'"),
    (b"{not JSON", 400, "JSON decode error"),
    (b'{"prompt": "\xff\xfe"}', 400, "parsing the body"),
    (b'{"prompt": "\\ud800"}', 400, "not valid Unicode"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature: "),
    (b"[" * 100_000, 400, ""),
    (b"[]", 400, "the body: "),
    (b'{"prompt": "' + b"a" * (1 << 20) + b'"}', 413, "a request has at most 262144 bytes"),
]


@pytest.mark.parametrize(("body", "status", "words"), RUBBISH, ids=range(len(RUBBISH)))
def test_rubbish_gets_a_sentence(server, body, status, words):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    got = httpx.post(f"{server.url}/v1/completions", content=data, headers=headers, timeout=30)
    assert got.status_code == status, got.text
    assert words in got.json()["error"]["message"]
    assert got.json()["error"]["type"] == "invalid_request_error"
    assert server.post(prompt="a", max_tokens=1).status_code == 200


def test_other_paths_methods_hosts_and_no_http_are_refused(server):
    for method, path, status in (
        ("GET", "/v2", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/x", 404),
    ):
        got = httpx.request(method, server.url + path)
        assert (got.status_code, bool(got.json()["error"]["message"])) == (status, True)
    rebound = httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example:80"})
    assert rebound.status_code == 421
    assert "127.0.0.1" in rebound.json()["error"]["message"]
    assert server.exchange(b"\x16\x03\x01 no HTTP\r\n\r\n").startswith(b"HTTP/1.1 400")


def leave_early(url, body):
    """Ask, and leave after the first piece, or after a while where there is none."""
    try:
        with httpx.stream("POST", url, json=body, timeout=0.3) as got:
            next(got.iter_text())
    except httpx.ReadTimeout:
        assert not body["stream"]


def test_a_client_that_left_costs_nothing_more(loaded):
    with serving(loaded, Limits(batch_size=1)) as running:
        running.step_s = 0.02
        for stream in (True, False):
            body = {"prompt": "a", "max_tokens": 60, "stream": stream, "temperature": 0}
            leave_early(f"{running.url}/v1/completions", body)
            before = running.steps
            assert running.post(prompt="b", max_tokens=2).status_code == 200
            assert running.steps - before < 10


def test_what_takes_too_long_or_waits_in_too_long_a_line_is_told(loaded):
    with serving(loaded, Limits(batch_size=1, waiting=1, request_s=0.6)) as running:
        running.step_s = 0.05
        late = running.post(prompt="a", max_tokens=60)
        assert late.status_code == 408
        assert "the time limit of 0.6 s is over" in late.json()["error"]["message"]
        streamed = events(running.post(prompt="a", max_tokens=60, stream=True))
        assert len(streamed) > 3
        assert "time limit" in streamed[-1]["error"]["message"]
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(running.post, prompt="a", max_tokens=60) for _ in range(4)]
            statuses = sorted(one.result().status_code for one in asked)
        assert statuses == [408, 408, 429, 429]
        running.step_s = 0.0
        assert running.post(prompt="a", max_tokens=2).status_code == 200


def test_idle_and_slow_connections_are_ended_and_cost_nobody_else(loaded):
    with serving(loaded, Limits(body_s=3.0)) as running:
        idle = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(1000)]
        idle[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        idle[1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        began = time.monotonic()
        assert running.post(prompt="a", max_tokens=20).status_code == 200
        assert time.monotonic() - began < 3.0
        for client in idle:
            client.settimeout(20)
            said = b"".join(iter(lambda client=client: client.recv(4096), b""))
            assert said.startswith(b"HTTP/1.1 408")
            assert b"within 3 s" in said
            client.close()


def test_a_client_that_does_not_read_is_cut_off_alone(loaded):
    limits = Limits(stall_s=1.0)
    with serving(loaded, limits, send_bytes=4096) as running:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", running.port))
        body = json.dumps({"prompt": ["a"] * 64, "max_tokens": 60, "stream": True}).encode()
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        assert running.post(prompt="b", max_tokens=5).status_code == 200
        time.sleep(2.5)
        slow.settimeout(10)
        got = b"".join(iter(lambda: slow.recv(65536), b""))
        assert b"data: " in got
        assert b"[DONE]" not in got
        slow.close()


def test_a_model_that_fails_ends_the_server_and_says_so(loaded):
    with serving(loaded) as running:
        running.fails = True
        got = running.post(prompt="a", max_tokens=5)
        assert got.status_code == 503
        assert "the model failed: out of everything" in got.json()["error"]["message"]
        assert str(running.batcher.failure) == "the model failed: out of everything"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                assert running.post(prompt="a").status_code == 503
            except httpx.TransportError:
                break
        else:
            pytest.fail("it still listens")


def test_a_token_is_asked_for(loaded):
    with serving(loaded, token="a-long-random-word") as running:
        refused = running.post(prompt="a")
        assert refused.status_code == 401
        assert "Authorization: Bearer" in refused.json()["error"]["message"]
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong").models.list()
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="a-long-random-word")
        assert client.completions.create(model="run", prompt="a").choices[0].text
        assert "textarea" in httpx.get(f"{running.url}/").text


def started(*words):
    """Start the command; return it and where it serves."""
    command = commands.Command("serve", *words)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and command.poll() is None:
        if found := re.search(r"serving at (\S+)/ ", command.said()[0]):
            return command, found[1]
        time.sleep(0.05)
    command.kill()
    raise AssertionError(command.end())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(trained_run, loaded, number):
    command, url = started(trained_run, "--port", "0")
    got = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "temperature": 0}, timeout=30)
    assert [one["text"] for one in got.json()["choices"]] == text_of(loaded, "ab")
    with httpx.stream("POST", f"{url}/v1/completions", json={"max_tokens": 50, "stream": True}) as long:
        pieces = long.iter_text()
        begin = next(pieces)
        command.send_signal(number)
        assert (begin + "".join(pieces)).endswith("data: [DONE]\n\n")  # what is under way is finished
    done = command.end(30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("stopped\n")
    assert done.stderr == ""


def test_without_its_packages_it_says_what_to_install(trained_run, monkeypatch):
    monkeypatch.delitem(sys.modules, "shoal.infer.serve.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(InputError, match=r"(?s)`shoal serve` needs uvicorn.*shoal\[serve\]"):
        serve(trained_run)


def test_what_cannot_be_served_is_a_sentence(trained_run, tmp_path):
    with pytest.raises(InputError, match=r"(?s)--host 0\.0\.0\.0 lets other machines in.*--token-file"):
        Address("0.0.0.0")
    short = tmp_path / "token"
    short.write_text("secret\n")
    refused = commands.run("serve", trained_run, "--host", "0.0.0.0", "--token-file", short)
    assert refused.returncode == 2
    assert "holds no token of 16 characters or more" in refused.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = commands.run("serve", trained_run, "--port", str(taken.getsockname()[1]))
    assert refused.returncode == 2
    assert "Address already in use" in refused.stderr
    refused = commands.run("serve", trained_run, "--batch-size", "0")
    assert refused.returncode == 2
    assert "--batch-size 0 is not allowed" in refused.stderr
