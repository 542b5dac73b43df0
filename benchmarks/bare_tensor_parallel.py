"""A GPT-2 cut over ranks by hand in bare torch: tensor parallelism without any framework around it.

torchrun --nproc 2 -m benchmarks.bare_tensor_parallel '{"n_layers": 9, ...}' FILE

trains until it is stopped, and adds a line with its number and seconds to FILE for each step.
"""

import itertools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Block(nn.Module):
    def __init__(self, width, heads, ranks):
        super().__init__()
        self.heads = heads // ranks
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width // ranks) for _ in range(3))
        self.up = nn.Linear(width, 4 * width // ranks)
        self.o = nn.Linear(width // ranks, width, bias=False)
        self.down = nn.Linear(4 * width // ranks, width, bias=False)
        self.o_bias, self.down_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))

    def forward(self, x):
        batch, time_, _ = x.shape
        y = SumBackward.apply(self.norm1(x))
        q, k, v = (p(y).view(batch, time_, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + SumForward.apply(self.o(y)) + self.o_bias
        y = F.gelu(self.up(SumBackward.apply(self.norm2(x))), approximate="tanh")
        return x + SumForward.apply(self.down(y)) + self.down_bias


class Gpt(nn.Module):
    def __init__(self, work, rank, ranks):
        super().__init__()
        width, self.columns = work["d_model"], work["padded_vocab_size"] // ranks
        self.first = rank * self.columns
        self.embed = nn.Parameter(torch.randn(self.columns, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(work["seq_len"], width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, work["n_heads"], ranks) for _ in range(work["n_layers"]))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        own, target = tokens - self.first, tokens[:, 1:].flatten() - self.first
        held = (own >= 0) & (own < self.columns)
        x = F.embedding(own.clamp(0, self.columns - 1), self.embed) * held.unsqueeze(-1)
        x = SumForward.apply(x[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(SumBackward.apply(self.norm(x)), self.embed).flatten(0, 1)
        highest = logits.detach().max(dim=1).values
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        logits = logits - highest[:, None]
        total = SumForward.apply(logits.exp().sum(dim=1)).log()
        held = (target >= 0) & (target < self.columns)
        picked = logits.gather(1, target.clamp(0, self.columns - 1)[:, None]).squeeze(1)
        return (total - SumForward.apply(picked * held)).sum()


def main():
    work = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    model = Gpt(work, rank, ranks)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    for step in itertools.count(1):
        torch.manual_seed(step)
        tokens = torch.randint(0, work["vocab_size"], (work["global_batch_size"], work["seq_len"] + 1))
        began = time.perf_counter()
        for micro in tokens.split(work["micro_batch_size"]):
            (model(micro) / tokens[:, 1:].numel()).backward()
        own = torch.stack([p.grad.norm() ** 2 for p in model.parameters()]).sum()
        dist.all_reduce(own)
        torch._foreach_mul_([p.grad for p in model.parameters()], (1 / own.sqrt()).clamp(max=1.0))
        optimiser.step()
        optimiser.zero_grad()
        if rank == 0:
            with open(sys.argv[2], "a") as file:
                file.write(json.dumps({"step": step, "seconds": time.perf_counter() - began}) + "\n")


if __name__ == "__main__":
    main()
