"""`shoal serve`, by the official client, by rubbish, and by clients that do not behave."""

from __future__ import annotations

import json
import re
import resource
import select
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
import torch

from shoal.cli.models import serve
from shoal.errors import InputError
from shoal.infer.load import load_text_model
from shoal.infer.sampling import Sampling
from shoal.infer.serve.server import Address, Limits, build_server, read_token
from shoal.infer.text import Writer, complete, prompt_rows
from tests import commands
from tests.infer.serving import events, serving

GREEDY = Sampling(temperature=0)


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
    ({"prompt": [-1] * 60_000}, 400, "prompt: "),
    ({"prompt": "a", "top_p": 0}, 400, "top_p: Input should be greater than 0"),
    (
        {"prompt": "a", "logprobs": 3},
        400,
        "logprobs: Value error, not supported by this server; leave it out",
    ),
    ({"prompt": "a", "logprobs": 0}, 400, "not supported by this server; leave it out"),
    ({"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty: Value error"),
    ({"prompt": "a", "tempertaure": 1}, 400, "tempertaure: Extra inputs are not permitted"),
    ({"prompt": "a", "stop": ["a"] * 5}, 400, "stop: "),
    ({"prompt": "a", "stop": "a" * 1001}, 400, "stop: String should have at most 1000 characters"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "the model 'gpt-4' is not here; this server has 'run'"),
    (b"{not JSON", 400, "JSON decode error"),
    (b'{"prompt": "\xff\xfe"}', 400, "parsing the body"),
    (b'{"prompt": "\\ud800"}', 400, "not valid Unicode"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature: "),
    (b"[" * 100_000, 400, ""),
    (b"[]", 400, "the body: "),
    (b'{"prompt": "' + b"a" * (8 << 20) + b'"}', 413, "a request has at most 262144 bytes"),
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
    blind = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}')  # as a web page may
    assert blind.status_code == 400
    rebound = httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example:80"})
    assert rebound.status_code == 421
    assert "127.0.0.1" in rebound.json()["error"]["message"]
    said = server.exchange(b"\x16\x03\x01 no HTTP\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400")
    assert b'{"error": {"message": "this is no HTTP request that the server understands"' in said


def test_what_changes_nothing_is_taken_and_no_temperature_is_too_low(loaded, server):
    idle = {
        "best_of": 1,
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": False,
        "suffix": "",
        "user": "me",
    }
    cold = server.post(prompt="ab", temperature=1e-320, **idle)
    assert cold.json()["choices"][0]["text"] == text_of(loaded, "ab")[0]


def test_a_wrong_list_holds_nobody_up(server):
    began = time.monotonic()
    assert server.post(prompt=[-1] * 60_000).status_code == 400
    assert server.post(prompt=[["a"]] * 30_000).status_code == 400
    assert time.monotonic() - began < 5  # it was 8 s for each


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_left_costs_nothing_more(loaded, stream):
    with serving(loaded, Limits(batch_size=1)) as running:
        running.step_s = 0.1
        client = running.connect(prompt="a", max_tokens=60, stream=stream, temperature=0)
        running.wait_for_steps(3)
        client.close()
        assert running.post(prompt="b", max_tokens=2, temperature=0).status_code == 200
        assert running.steps < 40  # of 60, had the first been made to its end


def test_what_takes_too_long_or_waits_in_too_long_a_line_is_told(loaded):
    wish = {"prompt": "a", "max_tokens": 60, "temperature": 0}
    with serving(loaded, Limits(batch_size=1, waiting=1, request_s=4)) as running:
        running.hold(after=12)
        *made, last = events(running.post(**wish, stream=True))
        assert "the time limit of 4 s is over" in last["error"]["message"]
        text = "".join(piece["choices"][0]["text"] for piece in made)
        assert text == text_of(loaded, "a", max_tokens=12)[0].rstrip("\ufffd")  # all that was made in time
        assert len(made) > 3
        running.hold(after=2)
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(running.post, **wish) for _ in range(4)]
            answers = sorted((one.result() for one in asked), key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [408, 408, 429, 429]
        assert "the time limit of 4 s is over" in answers[0].json()["error"]["message"]
        assert "2 requests are queued; the limit is 2" in answers[2].json()["error"]["message"]
        running.hold(after=float("inf"))
        assert running.post(prompt="a", max_tokens=2).status_code == 200


def test_idle_and_slow_connections_are_ended_and_cost_nobody_else(loaded):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # both ends of each are in this process
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    with serving(loaded, Limits(body_s=4.0)) as running:
        clients = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(2)]
        clients[0].sendall(head + b"Content-Le")
        clients[1].sendall(head + b"Content-Length: 50\r\n\r\n{")
        clients += [socket.create_connection(("127.0.0.1", running.port)) for _ in range(min(998, hard // 4))]
        assert running.post(prompt="a", max_tokens=20).status_code == 200
        ended = select.poll()
        for client in clients:
            ended.register(client, select.POLLIN)
        assert ended.poll(0) == []  # the answer came before any of them was ended
        for client in clients:
            client.settimeout(30)
            said = b"".join(iter(lambda client=client: client.recv(4096), b""))
            assert said.startswith(b"HTTP/1.1 408")
            assert b"within 4 s" in said
            client.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("texts", [3, 64])  # one that fits the server's own buffer, and one that does not
def test_a_client_that_does_not_read_is_cut_off_alone(loaded, texts):
    with serving(loaded, Limits(stall_s=1.0), send_bytes=4096) as running:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", running.port))
        body = json.dumps({"prompt": ["a"] * texts, "max_tokens": 60, "stream": True, "temperature": 0})
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body.encode()
        )
        running.wait_for_steps(2)
        assert running.post(prompt="b", max_tokens=5).status_code == 200
        running.wait_for(lambda: not running.server.server_state.connections)
        slow.settimeout(10)
        got = b"".join(iter(lambda: slow.recv(65536), b""))
        assert b"data: " in got
        assert b"[DONE]" not in got
        slow.close()


def test_a_model_that_fails_ends_the_server_and_says_so(loaded):
    with serving(loaded) as running:
        running.fails = True
        got = running.post(prompt="a", max_tokens=5, temperature=0)
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


def test_a_stop_gives_what_is_under_way_its_time_and_then_says_so(loaded, capfd):
    wish = {"prompt": "a", "max_tokens": 60, "temperature": 0}
    with ThreadPoolExecutor(2) as clients:
        with serving(loaded, Limits(grace_s=1)) as running:
            running.step_s = 0.2
            asked = [clients.submit(running.post, **wish, stream=stream) for stream in (False, True)]
            running.wait_for_steps(3)
            began = time.monotonic()
        assert time.monotonic() - began < 8  # of 12 s
        whole, streamed = (one.result() for one in asked)
        assert whole.status_code == 503
        assert whole.json()["error"]["message"] == "the server is stopping"
        assert events(streamed)[-1]["error"]["message"] == "the server is stopping"
    assert capfd.readouterr().err == ""


def test_texts_that_need_more_memory_than_there_is_are_refused(loaded, monkeypatch):
    monkeypatch.setattr("shoal.infer.serve.server.free_memory", lambda device: 3_000_000)
    message = r"(?s)16 texts of 64 tokens need \S+ GB, and 0\.0 GB are free.*--max-len"
    with pytest.raises(InputError, match=message):
        build_server(loaded, "run", Address(), Limits())
    _, batcher = build_server(loaded, "run", Address(), Limits(max_len=20))
    assert batcher.capacity == 20


def test_a_token_is_asked_for(loaded):
    with serving(loaded, token="a-long-random-word") as running:
        refused = running.post(prompt="a")
        assert refused.status_code == 401
        assert "Authorization: Bearer" in refused.json()["error"]["message"]
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong").models.list()
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="a-long-random-word")
        assert client.completions.create(model="run", prompt="a", temperature=0).choices[0].text
        assert "textarea" in httpx.get(f"{running.url}/").text


def started(*words, env=None):
    """Start the command; return it and where it serves."""
    command = commands.Command("serve", *words, env=env)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and command.poll() is None:
        if found := re.search(r"serving at (\S+)/ ", command.said()[0]):
            return command, found[1]
        time.sleep(0.05)
    command.kill()
    raise AssertionError(command.end())


def wait_until_refused(url):
    """Wait until a server takes no more connections."""
    host, port = url.removeprefix("http://").split(":")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except ConnectionError:
            return
        time.sleep(0.05)
    pytest.fail("it still listens")


# Put into the command: its model waits at a step while a file is there; it may take a minute to stop.
HELD = """
import os, time
from shoal.infer.generate import Engine
from shoal.infer.serve.server import Limits
honest, steps = Engine.step, 0

def step(self, chosen):
    global steps
    steps += 1
    while os.path.exists(os.environ["HOLD"]) and steps > 20:
        time.sleep(0.01)
    return honest(self, chosen)

Engine.step = step
Limits.__init__.__defaults__ = (*Limits.__init__.__defaults__[:-1], 60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.proof)])
def test_the_command_serves_until_it_is_stopped(trained_run, loaded, number, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HELD)
    hold = tmp_path / "hold"
    hold.touch()
    command, url = started(trained_run, "--port", "0", env={**commands.planted(tmp_path), "HOLD": str(hold)})
    got = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "temperature": 0}, timeout=30)
    assert [one["text"] for one in got.json()["choices"]] == text_of(loaded, "ab")
    wish = {"prompt": ["a"] * 16, "max_tokens": 30, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=wish, timeout=60) as long:
        pieces = long.iter_text()
        begin = next(pieces)
        command.send_signal(number)
        wait_until_refused(url)
        hold.unlink()
        rest = "".join(pieces)
    *found, end = (begin + rest).removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"  # what is under way is finished
    assert rest.count("data: ") > 100
    texts = [""] * 16
    for one in found:
        choice = json.loads(one.removeprefix("data: "))["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == text_of(loaded, "a", max_tokens=30) * 16
    done = command.end(60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("stopped\n")
    assert done.stderr == ""


def test_a_token_that_others_may_read_is_warned_of(tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("a-long-random-word\n")
    for mode, warned in ((0o600, False), (0o400, False), (0o640, True), (0o604, True), (0o644, True)):
        token.chmod(mode)
        assert read_token(token) == "a-long-random-word"
        said = capsys.readouterr().err
        assert said == f"warning: others on this machine may read {token}: chmod 600 {token}\n" * warned, mode


def test_no_other_page_may_hold_the_page_in_a_frame(server):
    headers = httpx.get(f"{server.url}/").headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"].split("; ")
    assert headers["x-frame-options"] == "DENY"


def test_without_its_packages_it_says_what_to_install(trained_run, monkeypatch):
    monkeypatch.delitem(sys.modules, "shoal.infer.serve.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(InputError, match=r"(?s)`shoal serve` needs uvicorn.*shoal\[serve\]"):
        serve(trained_run)


def test_what_cannot_be_served_is_a_sentence(trained_run, tmp_path):
    with pytest.raises(
        InputError, match=r"(?s)--host 0\.0\.0\.0 accepts connections from other machines.*--token-file"
    ):
        Address("0.0.0.0")
    with pytest.raises(InputError, match="--port 99999 is not a port"):
        Address(port=99999)
    with pytest.raises(InputError, match="--time-limit nan is not allowed"):
        Limits(request_s=float("nan"))
    with pytest.raises(InputError, match="--max-len -1 is not allowed"):
        Limits(max_len=-1)
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
