"""A link that is slow by delays: who waits, for how long, and that nothing else changes."""

import threading

import pytest
import torch

from shoal.comm.all_reduce import all_reduce
from shoal.comm.slow_transport import MBIT, SlowTransport, slowed
from shoal.comm.thread_transport import run_ranks


class Clock:
    """Time that passes only while somebody sleeps; one for each rank."""

    def __init__(self):
        self.seconds = 0.0
        self._changing = threading.Lock()

    def now(self):
        return self.seconds

    def sleep(self, seconds):
        with self._changing:
            self.seconds += seconds


def on_slow(size, bytes_per_s, work):
    """Return what each rank gave, and the seconds that it waited."""

    def run(transport):
        clock = Clock()
        return work(SlowTransport(transport, bytes_per_s, clock.now, clock.sleep)), clock.seconds

    return run_ranks(size, run)


def test_what_crosses_the_middle_takes_bytes_by_rate_and_the_rest_no_time():
    def work(transport):
        right, left = (transport.rank + 1) % 4, (transport.rank - 1) % 4
        arrived = torch.empty(100)
        transport.exchange(torch.full((100,), float(transport.rank)), right, arrived, left)
        return arrived[0].item()

    assert on_slow(4, 200.0, work) == [(3.0, 0.0), (0.0, 2.0), (1.0, 0.0), (2.0, 2.0)]


def test_tensors_in_flight_together_follow_each_other_on_the_link():
    def work(transport):
        other = 1 - transport.rank
        parts = [torch.full((50,), float(number)) for number in range(4)]
        arrived = [torch.empty(50) for _ in parts]
        handles = [transport.irecv(part, other) for part in arrived]
        handles += [transport.isend(part, other) for part in parts]
        for handle in handles:
            handle.wait()
        return [part[-1].item() for part in arrived], transport.traffic.num_bytes

    assert on_slow(2, 100.0, work) == [(([0.0, 1.0, 2.0, 3.0], 800), 8.0)] * 2


@pytest.mark.parametrize("algorithm", ["chunked_ring", "tree", "halving_doubling"])
def test_sums_are_the_same_and_counted_once(algorithm):
    def work(transport):
        tensor = torch.arange(1001.0) * (transport.rank + 1)
        all_reduce(transport, tensor, algorithm=algorithm)
        return tensor, transport.traffic.num_bytes

    slow, fast = on_slow(4, 1e5, work), run_ranks(4, work)
    for ((tensor, sent), _), (expected, as_many) in zip(slow, fast, strict=True):
        assert torch.equal(tensor, expected)
        assert sent == as_many
    assert max(seconds for _, seconds in slow) > 0.01


def test_no_rate_is_no_change():
    transport = run_ranks(1, lambda transport: transport)[0]
    assert slowed(transport, 0) is transport
    assert slowed(transport, 8)._bytes_per_s == 1e6 == 8 * MBIT
