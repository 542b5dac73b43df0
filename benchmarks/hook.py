"""Our hook for plain all-reduce beside DDP's built-in: the same model, batches and buckets, two processes.

Steps of the two alternate: forward, backward, and gradients ready. Each round draws which comes first. DDP's
own divides sums by the number of replicas; ours leaves that to the loss.

    python -m benchmarks.hook [--rounds 9] [--steps 4]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import write_record
from shoal.config.sections import Model
from shoal.gradsync.during_backward import SumDuringBackward
from shoal.gradsync.exchange import BackEnd
from shoal.models.init import build_decoder
from shoal.models.shape import resolve_shape
from shoal.scoring import loss_sum
from tests.pool import Pool

VOCAB_SIZE = 50_257
SHAPE = {"n_layers": 6, "d_model": 384, "n_heads": 6, "max_seq_len": 256}
BATCH = (2, 256)


def step_of(*, ours: bool) -> Callable[[torch.Tensor], None]:
    """Build a replica and return what does a step with it."""
    model = build_decoder(resolve_shape(Model.model_validate(SHAPE), VOCAB_SIZE), seed=1, device="cpu")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    hook = SumDuringBackward(dict(model.named_parameters()), BackEnd()) if ours else None
    if hook is not None:
        hook.attach(wrapped)
        hook.begin()

    def step(tokens_bt: torch.Tensor) -> None:
        wrapped.zero_grad(set_to_none=False)
        (loss_sum(wrapped(tokens_bt[:, :-1]), tokens_bt[:, 1:]) / tokens_bt.numel()).backward()
        if hook is not None:
            hook.wait()

    return step


def measure(rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds a step of each in every round, of this rank."""
    torch.set_num_threads(1)
    kinds = {"ours": step_of(ours=True), "ddp": step_of(ours=False)}
    draw, tokens = random.Random(0), torch.Generator().manual_seed(dist.get_rank())
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):  # the first one warms up
        for name in draw.sample(sorted(kinds), k=2):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                kinds[name](torch.randint(0, VOCAB_SIZE, (BATCH[0], BATCH[1] + 1), generator=tokens))
            dist.barrier()
            if number:
                seconds[name].append(round((time.perf_counter() - began) / steps, 4))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    wish = parser.parse_args()
    pool = Pool()
    try:
        seconds = pool.run(measure, 2, wish.rounds, wish.steps, timeout=1800)[0]
    finally:
        pool.close()
    ratios = [ddp / ours for ddp, ours in zip(seconds["ddp"], seconds["ours"], strict=True)]
    ratio = round(statistics.median(ratios), 3)
    figures = {
        "claim": "our hook for plain all-reduce is at least as fast as DDP's built-in (2 % for noise)",
        "speed_beside_ddp": ratio,
        "ratios": [round(one, 3) for one in ratios],
        "step_s": seconds,
        "work": {"shape": SHAPE, "vocab_size": VOCAB_SIZE, "sequences": BATCH[0], "processes": 2},
    }
    write_record("hook", figures)
    print(f"our hook: {ratio} of DDP's speed")
    if ratio < 0.98:
        sys.exit("error: our hook is slower than DDP's built-in")


if __name__ == "__main__":
    main()
