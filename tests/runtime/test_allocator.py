"""What a process that trains on a CPU does with memory that it was given back."""

import subprocess
import sys

import pytest

TENSOR_BYTES = 132_000 * 64 * 4
SCRIPT = """
import resource, sys
from shoal.runtime.allocator import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
import torch

def status(name):
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))

def step():
    x = torch.ones(132000, 64)  # above 32 MB: the most that the C library keeps by itself
    for layer in model:
        x = torch.relu(layer(x)) + x
    x.sum().backward()
    model.zero_grad()

peaks, faults = [], []
for number in range(int(sys.argv[2])):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    peaks.append(status("VmHWM"))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(max(peaks[-7:]) - min(peaks[-7:]), min(faults[-3:]))  # the kernel may take code away meanwhile
"""


def measured(how: str, steps: int) -> list[int]:
    command = [sys.executable, "-c", SCRIPT, how, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux alone is spoken to")
def test_freed_memory_is_kept_and_used_again():
    *_, pages_by_default = measured("default", 2)
    growth, pages = measured("keep", 15)
    assert growth < 4 * TENSOR_BYTES  # the first nine steps add tensors; one or two may follow, not six
    assert pages < pages_by_default / 10  # of a step, cleared by the kernel at first touch
