"""Faults put into every process of a job from outside, and what the job says in the end."""

LIMITS = ("--max-restarts", "0", "--train.steps", "100000", "--checkpoint.every", "0")


def told(screen):
    """Return the sentence after "error: ", which stands at the end, with at most a hint behind it."""
    line = next(line for line in reversed(screen) if line.startswith("error: "))
    assert all(rest.startswith("  hint: ") for rest in screen[screen.index(line) + 1 :]), screen
    return line.removeprefix("error: ")


SLEEP = """
from shoal.data.loader import Loader
read = Loader.batch
def batch(self, step):
    if unwell(step):
        time.sleep(10000)
    return read(self, step)
Loader.batch = batch
"""
SHAPE = """
import torch, torch.distributed as dist
from shoal.runtime.process import Process
add, calls = Process.sum, [0]
def sum(self, *values):
    calls[0] += 1
    return add(self, *values, *([0.0] if unwell(calls[0]) else []))
Process.sum = sum
"""
