"""What a process that trains on a CPU does with memory that it was given back."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from shoal.runtime.allocator import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
import torch

def status(name, path="/proc/self/status"):
    return sum(int(line.split()[1]) for line in open(path) if line.startswith(name)) * 1024

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))

def step():
    x = torch.ones(24000, 64)
    for layer in model:
        x = torch.nn.functional.gelu(layer(x)) + x
    x.sum().backward()
    model.zero_grad()

for number in range(20):
    step()
heap = [line.split()[0] for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
wide = sum(int(end, 16) - int(start, 16) for start, end in (part.split("-") for part in heap))
flags = [line for line in open("/proc/self/smaps") if line.startswith("VmFlags") and " hg" in line]
print(status("VmHWM"), wide, status("MemTotal", "/proc/meminfo"), len(flags))
"""


def measured(how: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=60, check=True
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux alone is spoken to")
def test_freed_memory_is_used_again_and_lies_in_huge_pages():
    peak_by_default, *_ = measured("default")
    peak, wide, memory, asked_for_huge_pages = measured("keep")
    assert peak < 1.3 * peak_by_default  # a heap that grows with every step has 1.8 times it
    assert wide > 0.4 * memory  # of addresses; never given back
    assert asked_for_huge_pages > 0
