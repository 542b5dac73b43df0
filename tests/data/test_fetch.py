"""Fetching from a real server: each kind of page, limits, politeness, interruptions."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest
from fastwarc.warc import ArchiveIterator

from shoal.data.prepare.web import address, client, fetch
from shoal.data.prepare.web.address import is_public
from shoal.data.prepare.web.client import Fetch
from shoal.data.prepare.web.fetch import Progress, fetch_all
from shoal.errors import DataError, InputError
from tests.data.web_server import serving

QUICK = {"delay": 0.0, "per_host": 32, "deadline": 60.0, "backoff": 0.02, "allow_private": True}


@pytest.fixture(scope="module")
def server():
    with serving() as one:
        yield one


def lookup(host, port, family, kind):
    """Let names that end in .test stand for this machine; ask nobody else."""
    if not host.endswith(".test"):
        raise socket.gaierror(socket.EAI_NONAME, "no such name")
    if host.startswith("later"):
        raise socket.gaierror(socket.EAI_AGAIN, "try again")
    return [(socket.AF_INET, kind, 6, "", ("127.0.0.1", port))]


def fetched(urls, folder, **settings):
    result = fetch_all(urls, folder, Fetch(**{**QUICK, **settings}), lookup=lookup)
    lines = [json.loads(line) for line in result.manifest.read_text().splitlines()]
    assert [line["url"] for line in lines] == list(urls)
    assert Counter(line["reason"] for line in lines) == result.counters
    return lines, result


def outcome(server, folder, path, host="127.0.0.1", **settings):
    """Fetch one page after a good one; return its line and the records of the good ones."""
    lines, result = fetched([server.url("/ok/first"), server.url(path, host)], folder, **settings)
    return lines[1], records(result)


def records(result):
    found = []
    for path in result.warcs:
        with path.open("rb") as file:
            for record in ArchiveIterator(file, parse_http=True, verify_digests=True):
                assert record.http_headers.status_code == 200
                found.append((record.headers, record.http_headers, record.reader.read()))
    return found


@pytest.mark.parametrize(
    ("path", "settings", "status", "reason"),
    [
        ("/nothing", {}, 404, "HTTP 404"),
        ("/broken", {}, 500, "HTTP 500"),
        ("/busy/40", {}, 429, "HTTP 429"),
        ("/loop/0", {}, 301, "redirect loop"),
        ("/on/1", {"max_redirects": 3}, 307, "too many redirects"),
        ("/nowhere", {}, 302, "bad redirect"),
        ("/redirect/ftp://example.com/", {}, 302, "bad redirect"),
        ("/redirect/http://a:b@127.0.0.1/", {}, 302, "bad redirect"),
        ("/redirect//private/x", {}, 302, "disallowed by robots.txt"),
        ("/silence", {"deadline": 3.0}, 0, "timeout"),
        ("/drip", {"deadline": 3.0}, 200, "timeout"),
        ("/endless", {"max_bytes": 1 << 20}, 200, "too large"),
        ("/bomb", {"max_bytes": 1 << 20}, 200, "too large"),
        ("/announced", {}, 200, "too large"),
        ("/wrong_gzip", {}, 200, "bad response"),
        ("/binary", {}, 200, "content type"),
        ("/binary/text/html", {}, 200, "binary content"),
        ("/empty", {}, 200, "empty page"),
        ("/cut", {}, 200, "bad response"),
        ("/garbage", {}, 0, "bad response"),
        ("/headers", {}, 0, "bad response"),
        ("/odd/redirect", {}, 404, "HTTP 404"),
        ("/hangup", {}, 0, "no connection"),
        ("/private/x", {}, 0, "disallowed by robots.txt"),
    ],
)
def test_a_bad_page_is_a_line_with_its_reason(server, tmp_path, path, settings, status, reason):
    line, kept = outcome(server, tmp_path / "f", path, **settings)
    assert (line["reason"], line["status"]) == (reason, status)
    assert (line["digest"], line["content_type"], line["bytes"]) == ("", "", 0)
    assert len(kept) == 1
    assert line["seconds"] < settings.get("deadline", 60.0) + 2.0


@pytest.mark.parametrize(
    ("path", "body", "attempts", "redirects"),
    [
        ("/ok/a", b"This is page a.", 1, 0),
        ("/flaky/once", b"good", 2, 0),
        ("/busy/0", b"good", 2, 0),
        ("/redirect//ok/b", b"This is page b.", 2, 1),
        ("/gzip/c", b"This is page c.", 1, 0),
        ("/charset", b"K\xe4se", 1, 0),
    ],
)
def test_a_good_page_is_a_line_and_a_record(server, tmp_path, path, body, attempts, redirects):
    line, kept = outcome(server, tmp_path / "f", path)
    assert (line["reason"], line["status"]) == ("ok", 200)
    assert (line["attempts"], line["redirects"]) == (attempts, redirects)
    warc, http, content = kept[1]
    assert body in content
    assert len(content) == line["bytes"]
    assert warc["WARC-Target-URI"] == line["final_url"]
    assert warc["WARC-Source-URI"] == line["url"] == server.url(path)
    assert warc["WARC-Payload-Digest"] == line["digest"]
    assert http["Content-Type"] == line["content_type"] == "text/html; charset=utf-8"
    assert "Content-Encoding" not in dict(http.items())


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("64:ff9b::5db8:d822", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False),
        ("239.1.1.1", False), ("240.0.0.1", False), ("255.255.255.255", False), ("192.0.2.1", False),
        ("::1", False), ("::", False), ("fe80::1", False), ("fe80::1%eth0", False), ("fc00::1", False),
        ("fec0::1", False), ("ff02::1", False), ("2001:db8::1", False), ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True), ("64:ff9b::a00:1", False), ("2002:7f00:1::", False),
        ("2002:5db8:d822::1", True), ("example.com", False), ("127.1", False),
    ],
)  # fmt: skip
def test_public_addresses_are_told_from_others(address, public):
    assert is_public(address) == public


PRIVATE = ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "10.0.0.1", "169.254.169.254", "0.0.0.0", "local.test"]


@pytest.mark.parametrize("host", [*PRIVATE, "[fe80::1%25eth0]"])
def test_nothing_is_sent_to_a_private_address(server, tmp_path, host):
    before = server.requests()
    with pytest.raises(DataError, match="1 of them because of: private address"):
        fetched([server.url("/ok/secret", host)], tmp_path, allow_private=False)
    assert server.requests() == before


def test_headers_that_are_no_text_do_no_harm(server, tmp_path):
    line, kept = outcome(server, tmp_path / "f", "/odd/control")
    assert (line["reason"], line["content_type"]) == ("ok", "text/html; x=?")
    assert kept[1][1]["Content-Type"] == "text/html; x=?"


@pytest.mark.parametrize("robots", [True, False])
@pytest.mark.parametrize("host", ["[::1]", "10.0.0.1", "[::ffff:a00:1]", "local.test", "inside.test"])
def test_a_redirect_to_a_private_address_is_not_followed(server, tmp_path, monkeypatch, host, robots):
    for module in (address, client):  # the server's own address stands for a public one
        monkeypatch.setattr(module, "is_public", lambda ip: ip == "127.0.0.1" or is_public(ip))
    names = {"inside.test": "10.0.0.1", "local.test": "127.0.0.2"}
    answers = {host: [(socket.AF_INET, 1, 6, "", (ip, server.port))] for host, ip in names.items()}
    before = server.requests()["/ok/secret"]
    urls = [server.url("/ok/a"), server.url(f"/redirect/{server.url('/ok/secret', host)}")]
    settings = Fetch(**{**QUICK, "allow_private": False, "robots": robots})
    result = fetch_all(urls, tmp_path, settings, lookup=lambda host, *_: answers[host])
    assert result.counters == {"ok": 1, "private address": 1}
    assert server.requests()["/ok/secret"] == before


def test_what_is_connected_to_is_what_was_checked(server, tmp_path, monkeypatch):
    """A name that is public when it is asked for first, and private the next time."""
    for module in (address, client):
        monkeypatch.setattr(module, "is_public", lambda ip: ip == "127.0.0.1")
    asked = []

    def rebind(host, port, family, kind):
        asked.append(host)
        return [(socket.AF_INET, kind, 6, "", (f"127.0.0.{len(asked)}", port))]

    urls = [server.url("/ok/a", "rebind.test"), server.url("/ok/b", "rebind.test")]
    result = fetch_all(urls, tmp_path, Fetch(**{**QUICK, "allow_private": False}), lookup=rebind)
    assert result.counters == {"ok": 2}
    assert asked == ["rebind.test"]


@pytest.mark.parametrize(
    ("host", "path", "reason"),
    [
        ("norules.test", "/private/x", "ok"),
        ("broken.test", "/ok/x", "robots.txt unreachable"),
        ("silent.test", "/ok/x", "robots.txt unreachable"),
        ("binary.test", "/private/x", "ok"),
        ("huge.test", "/private/x", "disallowed by robots.txt"),
        ("huge.test", "/ok/x", "ok"),  # the rule against it is beyond the size that is read
        ("absent.example", "/ok/x", "name not found"),
        ("later.test", "/ok/x", "no connection"),
    ],
)
def test_robots_txt_decides(server, tmp_path, monkeypatch, host, path, reason):
    monkeypatch.setattr("shoal.data.prepare.web.robots._TIMEOUT_S", 3.0)
    line, _ = outcome(server, tmp_path / "f", path, host)
    assert line["reason"] == reason


def test_robots_txt_may_be_ignored_and_is_asked_for_once(server, tmp_path):
    before = server.requests()["/robots.txt"]
    urls = [server.url(f"/ok/{n}", "once.test") for n in range(20)]
    fetched(urls, tmp_path / "a")
    assert server.requests()["/robots.txt"] == before + 1
    lines, _ = fetched([server.url("/private/x")], tmp_path / "b", robots=False)
    assert lines[0]["reason"] == "ok"
    assert server.requests()["/robots.txt"] == before + 1


def test_the_user_agent_names_shoal_and_a_contact(server, tmp_path):
    _, kept = outcome(server, tmp_path / "f", "/agent", contact="https://example.com/bot")
    assert re.fullmatch(rb"shoal/[0-9.]+ \(\+https://example\.com/bot\)", kept[1][2])
    with pytest.raises(ValueError, match="contact"):
        Fetch(contact="a\r\nX-Evil: 1")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://127.0.0.1:{port}/", "TLS failure"),
        ("http://127.0.0.1:1/", "no connection"),
        ("http://2130706433:{port}/", "malformed"),
        ("http://a:b@127.0.0.1:{port}/", "malformed"),
        ("http://127.0.0.1:99999/", "malformed"),
        ("ftp://127.0.0.1/", "malformed"),
        ("nothing", "malformed"),
    ],
)
def test_a_url_that_cannot_be_asked_for_has_a_reason(server, tmp_path, url, reason):
    lines, _ = fetched([url.format(port=server.port), server.url("/ok/a")], tmp_path)
    assert [line["reason"] for line in lines] == [reason, "ok"]


def test_retry_after_may_be_a_date():
    at = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert 95 < client._retry_after(at) <= 100
    assert [client._retry_after(text) for text in ("7", "9" * 50)] == [7, float("inf")]
    assert client._retry_after("") == client._retry_after("soon") == client._retry_after("-1") == 0


def test_requests_to_one_host_keep_their_distance(server, tmp_path):
    urls = [server.url(f"/ok/{n}", "calm.test") for n in range(5)]
    began = time.monotonic()
    fetched(urls, tmp_path / "a", delay=0.2)
    assert time.monotonic() - began >= 1.0  # robots.txt and five pages
    began = time.monotonic()
    fetched([url.replace("calm", "patient") for url in urls], tmp_path / "b")
    assert time.monotonic() - began >= 1.2  # its Crawl-delay is 0.3


def test_one_host_gets_no_more_requests_at_once_than_allowed(server, tmp_path):
    urls = [server.url(f"/later/{n}", f"{name}.test") for n in range(12) for name in "a"]
    fetched(urls, tmp_path / "a", per_host=3)
    assert server.requests()["most at once"] == 3
    urls = [server.url(f"/later/{n}", f"{name}.test") for n in range(4) for name in "abcd"]
    fetched(urls, tmp_path / "b", per_host=3, concurrency=7)
    assert 3 < server.requests()["most at once"] <= 7


def test_a_slow_host_does_not_hold_up_the_others(server, tmp_path):
    urls = [server.url(f"/ok/slow{n}", "patient.test") for n in range(20)]
    urls += [server.url(f"/ok/fast{n}", "fast.test") for n in range(20)]
    fetched(urls, tmp_path, concurrency=4, per_host=1)
    order = list(server.requests())
    assert order.index("/ok/fast19") < order.index("/ok/slow19")


def test_the_same_pages_give_the_same_bytes_but_for_times(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "SHARD_URLS", 7)
    urls = [server.url(f"/{kind}/{n}") for n in range(12) for kind in ("later", "ok", "nothing")]
    both = []
    for name, settings in (("a", {"concurrency": 1}), ("b", {"concurrency": 16})):
        lines, result = fetched(urls, tmp_path / name, **settings)
        for line in lines:
            line.pop("seconds")
        heads = [dict(warc.items()) | {"WARC-Date": ""} for warc, _, _ in records(result)]
        bodies = [(dict(http.items()), body) for _, http, body in records(result)]
        both.append((lines, [path.name for path in result.warcs], heads, bodies))
        assert [head["WARC-Source-URI"] for head in heads] == [url for url in urls if "nothing" not in url]
    assert both[0] == both[1]
    assert len(both[0][1]) == 5  # the sixth shard is one page that is not there
    assert sorted(path.name for path in (tmp_path / "a").glob("*[!z]")) == [
        "fetch.json",
        "manifest.jsonl",
        "urls.txt",
    ]


def test_progress_counts_to_the_end(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "_SAY_EVERY_S", 0.0)
    said: list[Progress] = []
    urls = [server.url(f"/{kind}/1") for kind in ("ok", "large", "nothing", "gzip")]
    fetch_all(urls, tmp_path, Fetch(**QUICK), said.append)
    assert [one.done for one in said] == [1, 2, 3, 4, 4]
    assert (said[-1].total, said[-1].ok_share) == (4, 0.75)
    assert str(Progress(1200, 5000, 213.25, 0.9)) == "1,200 of 5,000 pages, 3,800 left, 213.2 pages/s, 90% ok"


def test_nothing_to_fetch_or_nothing_fetched_is_an_error(server, tmp_path):
    with pytest.raises(DataError, match="there are no URLs to fetch"):
        fetch_all([], tmp_path / "a", Fetch())
    urls = [server.url("/nothing"), server.url("/none"), server.url("/empty")]
    for _ in range(2):
        with pytest.raises(
            DataError, match="none of 3 pages could be fetched, 2 of them because of: HTTP 404"
        ):
            fetched(urls, tmp_path / "b")


def test_a_finished_folder_is_read_and_another_list_or_setting_is_refused(server, tmp_path):
    urls = [server.url("/ok/again"), server.url("/ok/other")]
    first = fetched(urls, tmp_path)
    asked = server.requests()
    assert fetched(urls, tmp_path, concurrency=3, delay=9.0, per_host=1) == first
    with pytest.raises(DataError, match="max_bytes was 8388608, now 99"):
        fetched(urls, tmp_path, max_bytes=99)
    with pytest.raises(DataError, match="the list had 2 URLs, now 1, or other ones"):
        fetched(urls[:1], tmp_path)
    with pytest.raises(DataError, match="or other ones"):
        fetched(urls[::-1], tmp_path)
    assert fetched(urls, tmp_path) == first
    assert server.requests() == asked


def test_two_processes_do_not_fetch_into_one_folder(server, tmp_path):
    with fetch.alone_in(tmp_path), pytest.raises(InputError, match="another process"):
        fetched([server.url("/ok/x")], tmp_path)


def test_a_full_disk_is_named(server, small_disk):
    urls = [server.url(f"/ok/{n}/{'x' * 3000}") for n in range(600)]
    with pytest.raises(Exception, match="the disk is full"):
        fetched(urls, small_disk / "f")


CHILD = """
import json, sys
from pathlib import Path
from shoal.data.prepare.web import fetch
urls, folder, settings = json.loads(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
fetch.SHARD_URLS = 25
print("ready", flush=True)
try:
    result = fetch.fetch_all(urls, folder, fetch.Fetch(**settings))
except KeyboardInterrupt:
    sys.exit(75)
print(json.dumps(result.counters))
"""


def child(urls, folder, **settings):
    command = [sys.executable, "-c", CHILD, json.dumps(urls), str(folder), json.dumps({**QUICK, **settings})]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def journaled(folder):
    """Return the URLs that are stored: in the journals of shards in work, or in whole shards."""
    found = set()
    for path in [*folder.glob("*.journal"), *folder.glob("*.jsonl")]:
        with contextlib.suppress(FileNotFoundError):  # it became part of another file just now
            entries = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
            found |= {entry.get("line", entry)["url"] for entry in entries}
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.proof)])
def test_an_interruption_loses_no_page_and_fetches_none_twice(server, tmp_path, monkeypatch, number):
    tag, rng, folder = f"{number.name}", random.Random(5), tmp_path / "f"
    urls = [server.url(f"/later/{tag}{n}") for n in range(150)]
    urls[10::30] = [server.url(f"/nothing/{tag}{n}") for n in range(5)]
    kills, stored = 0, set()
    while True:
        before = server.requests()
        process = child(urls, folder, concurrency=4)
        more = rng.randint(5, 60)  # the end of a shard is among the moments
        while len(journaled(folder)) < len(stored) + more and process.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.03))
        process.send_signal(number)
        status = process.wait()
        process.stdout.close()
        asked = {path for path, count in (server.requests() - before).items()}
        assert not {url for url in stored if url.removeprefix(server.url("")) in asked}
        assert stored <= journaled(folder)
        stored = journaled(folder)
        if status == 0:
            break
        assert status == (-9 if number == signal.SIGKILL else 75)
        kills += 1
    assert kills >= 3
    counts = server.requests()
    asked = [counts[url.removeprefix(server.url(""))] for url in urls]
    assert min(asked) == 1
    assert sum(asked) - len(urls) <= 4 * kills  # those in flight
    monkeypatch.setattr(fetch, "SHARD_URLS", 25)
    lines, result = fetched(urls, folder)
    assert result.counters == {"ok": 145, "HTTP 404": 5}
    assert [http["WARC-Source-URI"] for http, _, _ in records(result)] == [
        line["url"] for line in lines if line["reason"] == "ok"
    ]
    assert not [path for path in folder.iterdir() if path.suffix in (".spool", ".journal", ".tmp")]


def test_what_a_power_cut_left_damaged_is_fetched_again(server, tmp_path):
    urls = [server.url(f"/ok/power{n}") for n in range(20)] + [server.url("/silence")]
    process = child(urls, tmp_path, deadline=60.0)
    deadline = time.monotonic() + 20
    while len(journaled(tmp_path)) < 20 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    process.stdout.close()
    order = [json.loads(line) for line in (tmp_path / "00000.journal").read_bytes().splitlines()]
    with (tmp_path / "00000.spool").open("r+b") as spool:
        spool.seek(order[12]["start"] + 30)
        spool.write(b"damage")
    with (tmp_path / "00000.journal").open("ab") as journal:
        journal.write(b'{"at": 3, "start": 5, "le')
    facts = json.loads((tmp_path / "fetch.json").read_text())
    facts["settings"]["deadline"] = 1.0
    (tmp_path / "fetch.json").write_text(json.dumps(facts))
    process = child(urls, tmp_path, deadline=1.0)
    assert process.wait() == 0
    assert json.loads(process.stdout.read()) == {"ok": 20, "timeout": 1}
    process.stdout.close()
    counts = server.requests()
    asked = [counts[f"/ok/power{entry['at']}"] for entry in order]
    assert asked == [1] * 12 + [2] * 8


@pytest.mark.proof
def test_memory_stays_flat_whatever_servers_send(server, tmp_path):
    """16 endless bodies and 16 gzip bombs at once, and 2,000 pages after them."""
    urls = [server.url(f"/{kind}/{n}") for n in range(16) for kind in ("endless", "bomb")]
    urls += [server.url(f"/large/{n}") for n in range(2000)]
    process = child(urls, tmp_path, max_bytes=1 << 20, deadline=60.0)
    start, peak = anonymous_bytes(process.pid), 0
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(0.01)
    assert json.loads(process.stdout.read()) == {"ok": 2000, "too large": 32}
    process.stdout.close()
    assert peak - start < 120 << 20


def anonymous_bytes(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:"))
    return 0
