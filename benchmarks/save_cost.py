"""What saving every 50 steps costs in tokens/s: one run, its steps with a save beside them against the rest.

The shape of all CPU comparisons in steps of 4 sequences of 256 tokens: short steps, so that a save weighs
most. The checkpoint is written beside the steps that follow, so all steps between two saves count.

    python -m benchmarks.save_cost [--saves 3] [--every 50]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.data_parallel import random_tokens, train
from benchmarks.record import write_record

SHARE = 0.02  # of tokens/s: the most that saving every 50 steps may cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--every", type=int, default=50)
    wish = parser.parse_args()
    total = (wish.saves + 1) * wish.every
    small = {"train.global_batch_size": 4, "train.micro_batch_size": 4, "precision.dtype": "fp32"}
    often = {"train.steps": total, "checkpoint.every": wish.every, "train.log_every": 1}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = train(random_tokens(folder / "data"), folder / "run", small | often)
    held = {line["step"]: line["save_held_s"] for line in lines if "save_held_s" in line}
    steps = {line["step"]: line["seconds"] for line in lines if "loss" in line}
    # The second half between two saves is free of them: a save is done long before.
    free = [
        seconds for step, seconds in steps.items() if step > wish.every and step % wish.every > wish.every / 2
    ]
    usual = statistics.median(free)
    costs = []
    for save in range(wish.every, total, wish.every):
        beside = [steps[step] for step in range(save + 1, save + wish.every // 2 + 1)]
        costs.append((held[save] + sum(beside) - len(beside) * usual) / (wish.every * usual))
    share = statistics.median(costs)
    figures = {
        "claim": f"a save every {wish.every} steps costs at most {SHARE:.0%} of tokens/s",
        "share": round(share, 5),
        "shares": [round(cost, 5) for cost in costs],
        "usual_step_s": round(usual, 4),
        "held_s": list(held.values()),
        "step_s": list(steps.values()),
    }
    write_record("save_cost", figures)
    print(f"{share:.2%} of {wish.every} steps of {usual:.2f} s")
    if share > SHARE:
        sys.exit(f"error: a save every {wish.every} steps costs {share:.2%}, more than {SHARE:.0%}")


if __name__ == "__main__":
    main()
