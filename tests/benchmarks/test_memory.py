"""The profiler's memory events add up to what was alive at a time."""

import torch

from benchmarks.memory import peak_bytes


def test_the_peak_is_of_what_is_alive_together():
    def one_after_the_other():
        for _ in range(3):
            torch.ones(250_000)

    def together():
        return [torch.ones(250_000) for _ in range(3)]

    assert peak_bytes(one_after_the_other) == 1_000_000
    assert peak_bytes(together) == 3_000_000
