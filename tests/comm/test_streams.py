"""The order of work on a GPU between threads that play ranks, each in a stream of its own."""

import threading
from types import SimpleNamespace

import pytest
import torch

from shoal.comm.thread_transport import run_ranks
from shoal.strategies import compression


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True


class Stream:
    """Notes what is queued, as far as order goes; a moment stands for all that was queued before it."""

    def __init__(self):
        self.queued = []

    def record_event(self):
        return tuple(self.queued)

    def wait_event(self, moment):
        self.queued += [work for work in moment if work not in self.queued]


@pytest.fixture
def streams(monkeypatch):
    """A stream for each thread, by its name."""
    made = {}
    current = lambda device=None: made.setdefault(threading.get_ident(), Stream())  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    copy = torch.Tensor.copy_

    def noted(into, source):
        if isinstance(into, OnGpu):
            current().queued.append("copied")
        return copy(into, source)

    monkeypatch.setattr(OnGpu, "copy_", noted, raising=False)
    return current


def test_what_arrives_follows_the_senders_work_and_what_the_sender_does_next_follows_the_copy(streams):
    def work(transport):
        tensor = torch.zeros(3).as_subclass(OnGpu)
        if transport.rank == 0:
            streams().queued.append("written")
            transport.send(tensor, 1)
        else:
            transport.recv(tensor, 0)
            streams().queued.append("read")
        return streams().queued

    sender, receiver = run_ranks(2, work)
    assert receiver == ["written", "copied", "read"]
    assert sender == ["written", "copied"]


def test_the_thread_of_an_exchange_sits_on_the_gpu_of_its_stream(monkeypatch):
    """Also where a device comes without its number, which torch's set_device refuses."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=torch.device("cuda", 1)))
    moment = SimpleNamespace(record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: moment)
    monkeypatch.setattr(compression._Thread, "_in_stream", staticmethod(lambda stream, asked, work: work()))
    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(torch.device(device).index))
    compression._Thread(torch.device("cuda")).start(lambda: None)._future.result()
    assert devices == [1]
