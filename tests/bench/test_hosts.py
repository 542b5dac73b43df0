"""Two hosts of network namespaces: what their cable lets through."""

import socket
import subprocess
import sys

import pytest

from shoal.bench import hosts
from shoal.bench.hosts import ADDRESSES
from tests.two_hosts import make_hosts

SEND = (
    "import socket; c = socket.create_connection((%r, 5000)); c.sendall(bytes(%d)); c.shutdown(1); c.recv(1)"
)
TAKE = """
import socket, time
server = socket.create_server((%r, 5000)); print("ready", flush=True)
c, _ = server.accept(); total = len(c.recv(1 << 16)); began = time.perf_counter()
first = total
while part := c.recv(1 << 16): total += len(part)
print((total - first) / (time.perf_counter() - began))
"""


def test_a_transfer_goes_at_the_rate_of_the_cable():
    """2.5 MB at 10 MB/s, less the bucket that passes at once; headers and a busy machine take their share."""
    rates = []
    with make_hosts(10e6) as two:
        for _ in range(3):
            take = two.start("north", [sys.executable, "-c", TAKE % ADDRESSES["north"]])
            assert take.stdout.readline() == "ready\n"
            two.start("south", [sys.executable, "-c", SEND % (ADDRESSES["north"], 2_500_000)])
            rates.append(float(take.communicate(timeout=20)[0]))
    assert 8e6 < max(rates) < 10.5e6, rates


def test_hosts_have_names_of_their_own_and_go_with_what_runs_on_them():
    with make_hosts() as two:
        named = two.start("south", ["hostname"])
        assert named.communicate(timeout=20)[0] == "south\n" != socket.gethostname() + "\n"
        sleeper = two.start("north", ["sh", "-c", "echo there; exec sleep 100"])
        assert sleeper.stdout.readline() == "there\n"  # until then it may be on no host yet
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert spaces.count(f"{hosts._PREFIX}-") >= 2
    assert sleeper.wait(5) == -9


def test_what_is_lacking_is_named(monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else "/sbin/" + tool)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    assert hosts.why_not() == ""
    assert hosts.why_not(shaped=True).endswith("this needs tc")
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert hosts.why_not().endswith("this needs root")


def test_a_host_that_cannot_be_made_leaves_nothing_behind(monkeypatch):
    with make_hosts():
        pass
    honest = hosts._run

    def without_shaping(*words):
        if words[0] == "tc":
            raise subprocess.CalledProcessError(2, words, stderr="Specified qdisc kind is unknown.")
        return honest(*words)

    monkeypatch.setattr(hosts, "_run", without_shaping)
    with pytest.raises(subprocess.CalledProcessError):
        hosts.TwoHosts(1e6)
    assert f"{hosts._PREFIX}-{hosts.os.getpid()}-" not in honest("ip", "netns", "list")
