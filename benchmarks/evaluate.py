"""Tokens/s of evaluation beside the forward pass of training, on the same model, in turns.

Evaluation scores windows as `shoal evaluate` does, tokenised text to figures; training's forward pass is
timed alone, its graph kept for a backward pass that does not come. Both in float32, on the same threads.

    python -m benchmarks.evaluate [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.record import write_record
from benchmarks.serve import make_model
from shoal.infer.measure import score_all
from shoal.infer.score import sliding_spans
from shoal.models.loss import CrossEntropy

SHAPE, SEQ_LEN, BATCH, WINDOWS = "small", 256, 8, 16
FLOOR = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        loaded = make_model(SHAPE, Path(folder))
    model, loss = loaded.model, CrossEntropy()
    tokens = np.random.default_rng(0).integers(1, 50_000, SEQ_LEN * WINDOWS + 1)
    spans = sliding_spans(tokens, SEQ_LEN, SEQ_LEN)
    batches = torch.from_numpy(np.stack([span.tokens for span in spans])).split(BATCH)

    def evaluated() -> float:
        return sum(one.loss for one in score_all(loaded, spans, BATCH))

    def forward() -> float:
        return sum(loss(model(batch[:, :-1]), batch[:, 1:]).item() for batch in batches)

    rates: dict[str, list[float]] = {"evaluation": [], "training forward": []}
    losses = {}
    for number in range(rounds + 1):  # the first one warms up
        for name, work in (("evaluation", evaluated), ("training forward", forward)):
            began = time.perf_counter()
            losses[name] = work()
            if number:
                rates[name].append(round(SEQ_LEN * WINDOWS / (time.perf_counter() - began), 1))
    pairs = zip(rates["evaluation"], rates["training forward"], strict=True)
    ratio = round(statistics.median(ours / theirs for ours, theirs in pairs), 3)
    figures = {"shape": SHAPE, "seq_len": SEQ_LEN, "batch_size": BATCH, "tokens_per_s": rates}
    write_record("evaluate", {**figures, "losses": losses, "ratio": ratio, "floor": FLOOR})
    print(rates, losses, ratio)
    return int(ratio < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
