"""What recompute and our loss save, in bytes that torch's profiler sees allocated and freed, in real passes.

gpt2-medium, 8 sequences, forward and backward in fp32 under each train.recompute; and the loss of 8,192
tokens over 50,304 ids in bf16, beside torch's own cross entropy.

    python -m benchmarks.memory [--seq-len 256]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import write_record
from shoal.config.load import load_config
from shoal.models.decoder import Decoder
from shoal.models.init import build_decoder
from shoal.models.shape import resolve_shape
from shoal.scoring import loss_sum

VOCAB_SIZE = 50_257
SEQUENCES = 8
LOSS_TOKENS = 8_192
HALF = 0.5  # of the activation memory: the most that full recompute may need
LOGITS = 1.1  # times the logits: the most that our loss may need, backward included


def peak_bytes(work: Callable[[], Any]) -> int:
    """Return the most bytes that `work` had allocated at a time, beyond those of the beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def medium() -> Decoder:
    """Build gpt2-medium with its gradients in place."""
    config = load_config("gpt2-medium", {})
    model = build_decoder(resolve_shape(config.model, VOCAB_SIZE), seed=1, device="cpu")
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    return model


def of_recompute(seq_len: int) -> dict[str, int]:
    """Return the peak of the blocks' forward and backward pass under each mode; head and loss apart."""
    model = medium()
    tokens = torch.randint(0, VOCAB_SIZE, (SEQUENCES, seq_len), generator=torch.Generator().manual_seed(1))
    peaks = {}
    for mode in ("none", "selective", "full"):
        model.set_recompute(mode, 1)
        peaks[mode] = peak_bytes(lambda: model.hidden(tokens).sum().backward())
        print(f"recompute = {mode}: {peaks[mode] / 1e9:.2f} GB", flush=True)
    return peaks


class Put(torch.autograd.Function):
    """Stands for the head: puts logits out, and wants their gradient for nothing but the weights."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def of_loss() -> dict[str, int]:
    """Return the peak of each loss, its logits and the backward pass included."""
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, VOCAB_SIZE, (LOSS_TOKENS,), generator=generator)
    logits = torch.randn(LOSS_TOKENS, 50_304, generator=generator).bfloat16()

    def backward(loss: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        leaf = logits.clone().requires_grad_()
        return lambda: loss(Put.apply(leaf)).backward()

    return {
        "logits": logits.nbytes,
        "torch": peak_bytes(backward(lambda x: F.cross_entropy(x.float(), targets, reduction="sum"))),
        "shoal": peak_bytes(backward(lambda x: loss_sum(x, targets))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=256)
    wish = parser.parse_args()
    loss = of_loss()
    print({name: f"{size / 1e9:.2f} GB" for name, size in loss.items()}, flush=True)
    peaks = of_recompute(wish.seq_len)
    share = round(peaks["full"] / peaks["none"], 4)
    figures = {
        "claim": f"full recompute needs at most {HALF:.0%} of the activation memory, the loss {LOGITS} times "
        "its logits",
        "share_of_full_recompute": share,
        "recompute_peak_bytes": peaks,
        "work": {"model": "gpt2-medium", "sequences": SEQUENCES, "seq_len": wish.seq_len, "dtype": "fp32"},
        "loss_peak_bytes_with_its_logits": loss,
        "loss_work": {"tokens": LOSS_TOKENS, "padded_vocab_size": 50_304, "dtype": "bf16"},
    }
    write_record("memory", figures)
    if share > HALF:
        sys.exit(f"error: full recompute needs {share:.0%}")
    if loss["shoal"] > LOGITS * loss["logits"]:
        sys.exit(f"error: the loss needs {loss['shoal'] / loss['logits']:.2f} times its logits")


if __name__ == "__main__":
    main()
