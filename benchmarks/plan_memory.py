"""Predicted memory beside that of a simulated step, for each rank that differs.

GPT-2 124M and 345M and a Llama shape under twelve layouts and each recompute setting. Micro-batches have 1, 4
or 16 sequences, and each of these meets every model, layout and setting. Then the other optimisers, dropout,
and gpt2-8b on 512 GPUs.

    python -m benchmarks.plan_memory [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

from benchmarks.record import write_record
from shoal.config.layout import parse_layout
from shoal.config.layout_rules import check_layout
from shoal.plan.memory import CATEGORIES, memory_of
from shoal.plan.simulate import simulate
from tests.plan.workloads import workload

LIMIT = 0.05
PRESETS = {"gpt2": {}, "gpt2-medium": {}, "llama-160m": {"n_kv_heads": 4}}
LAYOUTS = (
    *("1", "dp2", "zero1x2", "zero2x2", "zero3x4", "tp2", "tp2+sp"),
    *("pp2", "pp2+gpipe", "pp2+interleaved", "dp2*tp2", "zero3x2*tp2+sp"),
)
RECOMPUTE = ("none", "selective", "full")
BATCHES = (1, 4, 16)
BETWEEN = ("weights", "gradients", "optimizer")
Case = tuple[str, str, str, dict[str, dict[str, Any]], int]  # preset, layout, dtype, settings, micro-batches


def cases(*, quick: bool) -> Iterator[Case]:
    """Yield what is compared; number formats and micro-batches change from case to case."""
    every = itertools.product(PRESETS, LAYOUTS, RECOMPUTE)
    for number, (preset, layout, how) in enumerate(every):
        if quick and number % 5:
            continue
        size = BATCHES[(number + number // 3 + number // 36) % 3]  # a Latin square
        train = {"recompute": how, "micro_batch_size": size, "seq_len": 1024}
        count = 2 * parse_layout(layout).pp if "pp" in layout else 1 + number % 2
        dtype = ("fp32", "bf16")[(number // 3) % 2]
        yield preset, layout, dtype, {"model": PRESETS[preset], "train": train}, count
    for optimizer, layout in (("sgd", "zero3x2"), ("sgd", "tp2"), ("muon", "dp2"), ("muon", "pp2")):
        settings = {"optimizer": {"name": optimizer}, "train": {"micro_batch_size": 1, "recompute": "full"}}
        yield "gpt2", layout, "bf16", settings, 2
    dropout = {"model": {"dropout": 0.1, "attention_dropout": 0.1}, "train": {"micro_batch_size": 4}}
    yield "gpt2", "1", "bf16", dropout, 1
    yield "gpt2", "pp2+zero_bubble", "bf16", {"train": {"micro_batch_size": 4}}, 4
    yield "gpt2-8b", "dp64*tp8", "bf16", {"train": {"recompute": "full"}}, 1


def compare(case: Case) -> list[dict[str, Any]]:
    """Return a row for each place of the pipeline."""
    preset, layout, dtype, settings, count = case
    planned = workload(preset, layout, dtype, num_microbatches=count, **settings)
    check_layout(planned.config, planned.layout, planned.shape)
    rows = []
    for memory in memory_of(planned):
        seen = simulate(planned, memory.pp_rank * planned.layout.dp * planned.layout.tp)
        between = memory.moments[0].bytes, seen.moments[0].bytes
        rows.append(
            {
                "preset": preset,
                "layout": layout,
                "pp_rank": memory.pp_rank,
                "dtype": dtype,
                **{name: value for section in settings.values() for name, value in section.items()},
                "num_microbatches": count,
                "predicted": memory.peak_bytes,
                "simulated": seen.peak_bytes,
                "error": round(memory.peak_bytes / seen.peak_bytes - 1, 4),
                "exact": all(between[0][name] == between[1][name] for name in BETWEEN),
                "moment": memory.peak.name,
                "by_category": {
                    name: [memory.peak.bytes[name], seen.peak.bytes[name]]
                    for name in CATEGORIES
                    if memory.peak.bytes[name] or seen.peak.bytes[name]
                },
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the cases of make proof, without a record")
    wish = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with get_context("spawn").Pool(2) as pool:
        for some in pool.imap(compare, cases(quick=wish.quick)):
            rows += some
            for row in some:
                print(
                    f"{row['error']:+7.1%} {row['preset']:12} {row['layout']:16} {row['dtype']} "
                    f"{row.get('recompute', ''):9} {row.get('micro_batch_size', 1):2} x "
                    f"{row['num_microbatches']} of pp {row['pp_rank']}: {row['simulated'] / 1e9:.2f} GB",
                    flush=True,
                )
    errors = sorted(abs(row["error"]) for row in rows)
    worst = max(rows, key=lambda row: abs(row["error"]))
    print(f"{len(rows)} pairs: median {errors[len(errors) // 2]:.1%}, worst {worst}")
    if not wish.quick:
        figures = {
            "claim": f"peak memory within {LIMIT:.0%} of the simulation; what is held between steps exact",
            "pairs": len(rows),
            "median_error": errors[len(errors) // 2],
            "largest_error": errors[-1],
            "within_limit": sum(error <= LIMIT for error in errors),
            "exact": sum(row["exact"] for row in rows),
            "rows": rows,
        }
        write_record("plan_memory", figures)
    if errors[-1] > LIMIT or not all(row["exact"] for row in rows):
        sys.exit("error: predictions are further off than claimed")


if __name__ == "__main__":
    main()
