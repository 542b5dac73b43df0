"""Workers of asynchronous SGD in one process, and their weights."""

import torch
from torch import nn

from shoal.strategies.async_sgd import AsyncSgd, Update

SHAPES = {"embed": (12, 16), "up": (7, 9), "bias": (5,)}
RATE = 0.1


def weights():
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))
        for name, shape in SHAPES.items()
    }


def update_of(kind, **settings):
    """Return what makes an optimiser of torch, and names its state as checkpoints do."""

    def make(named):
        optimiser = kind([{"params": list(named.values())}], lr=RATE, **settings)

        def step(rate):
            optimiser.param_groups[0]["lr"] = rate
            optimiser.step()

        def state():
            for weight in named.values():
                if not optimiser.state[weight] and settings:
                    optimiser.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            return {f"{name}.{key}": t for name, w in named.items() for key, t in optimiser.state[w].items()}

        return Update(step, state)

    return make


PLAIN, MOMENTUM = update_of(torch.optim.SGD), update_of(torch.optim.SGD, momentum=0.9)


class There:
    """All workers, over a transport that is there already."""

    def __init__(self, transport):
        self.everybody = lambda step: transport
        self.leave = lambda: None


def make(transport, bound, kind=PLAIN, named=None):
    named = named or weights()
    whole = kind(named)
    others = There(transport) if transport.size > 1 else None
    return named, whole, AsyncSgd(named, whole.state, kind, bound, transport.rank, transport.size, others)


def gradient(name, weight, step, worker=0):
    """Return the gradient of a made-up loss, which depends on the weights and on who asks."""
    return weight.detach().cos() * (1 + 0.3 * worker) + step / 7 + len(name)


def train(named, sync, steps, worker=0, start=0):
    for step in range(start + 1, start + steps + 1):
        for name, weight in named.items():
            weight.grad = gradient(name, weight, step, worker)
        sync.take_step(None, RATE)
        sync.after_step(step)
