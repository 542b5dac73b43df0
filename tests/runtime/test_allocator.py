"""What a process that trains on a CPU does with memory that it was given back."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from shoal.runtime.allocator import keep_memory
keep_memory()
import torch

def status(name, path="/proc/self/status"):
    return sum(int(line.split()[1]) for line in open(path) if line.startswith(name)) * 1024

model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))

def step():
    x = torch.ones(3000, 512)
    for layer in model:
        x = torch.nn.functional.gelu(layer(x)) + x
    x.sum().backward()
    model.zero_grad()

used = []
for number in range(30):
    step()
    used.append(status("RssAnon"))
heap = [line.split()[0] for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
wide = sum(int(end, 16) - int(start, 16) for start, end in (part.split("-") for part in heap))
flags = [line for line in open("/proc/self/smaps") if line.startswith("VmFlags") and " hg" in line]
print(used[9], used[-1], wide, status("MemTotal", "/proc/meminfo"), len(flags))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux alone is spoken to")
def test_freed_memory_is_used_again_and_lies_in_huge_pages():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    early, late, wide, memory, asked_for_huge_pages = map(int, done.stdout.split())
    assert late < 1.05 * early
    assert wide > 0.4 * memory  # of addresses; never given back
    assert asked_for_huge_pages > 0
