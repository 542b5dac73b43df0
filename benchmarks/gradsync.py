"""How far each strategy falls behind all-reduce at equal tokens, and what it saves on a link of 100 Mbit/s.

A GPT of 3.5M parameters on the source text of Python's standard library. Each training is a `shoal train` of
its own; its folder stays below --runs, and the same command goes on where it was stopped. `convergence` adds
to its record what is asked for, so a few trainings at a time will do. Another --batch is another record.

    python -m benchmarks.gradsync convergence [--workers 2 4] [--only diloco:every=50] [--batch 64]    hours
    python -m benchmarks.gradsync link                                                    as root, 30 minutes
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.record import RECORDS, write_record
from shoal.bench.cells import Cell, CellResult, Network, parse_way
from shoal.bench.gradsync import HOSTS, LOCAL, make_data, measure, tables
from shoal.bench.record import describe
from shoal.data.dataset import open_dataset
from shoal.runtime.startup import install_stop_handlers

TEXT = ("stdlib", "--vocab-size", "4096", "--split", "95,5,0")
SEQ_LEN, BATCH = 128, 16
SETTINGS = {
    "optimizer.lr": 2e-3,  # best for all-reduce of 1e-3, 2e-3 and 4e-3
    "model.n_layers": 6,
    "model.d_model": 192,
    "model.n_heads": 6,
    "model.max_seq_len": SEQ_LEN,
    "train.seq_len": SEQ_LEN,
    "eval.sequences": 256,
}
BASE, COUNTED_BASE = "allreduce", "allreduce:algorithm=chunked_ring"
COMPRESSED = ("onebit", "onebit:warmup_steps=200", "powersgd", "powersgd:rank=32", "int8", "topk")
OUTER = ("diloco", "streaming_diloco", "block_momentum")
NEAR, NEAR_OUTER = 1.01, 1.02  # times the loss of all-reduce
LINK = "100mbit"
FEWER_BYTES, FEWER_BYTES_OUTER = 20, 0.9  # times, and times H
UNHINDERED = 0.9  # of the tokens/s without a limit
SHARDED = "dp2*zero2x2"
BY_STEP = ("step_s", "communication_s", "sync_bytes")
DEFAULT_STEPS = {"convergence": 1000, "link": 60}

Facts = dict[str, Any]


def convergence(
    data: Path, batch: int, workers: Sequence[int], steps: int, every: Sequence[int]
) -> list[Cell]:
    """Return the trainings that are compared at equal tokens."""
    words = [BASE, *COMPRESSED, *(f"{name}:every={h}" for name in OUTER for h in every)]
    network = _network(data, batch, 200, "auto")
    return [Cell(network, parse_way(word, steps), n, LOCAL, steps) for n in workers for word in words]


def link(data: Path, batch: int, steps: int, every: int) -> list[Cell]:
    """Return the trainings on two hosts: three rounds of H steps each, or `steps` where nothing waits."""
    network, rounds = _network(data, batch, 0, "fp32"), math.ceil(3 * every / 0.9)  # a tenth is warm-up
    cells = [Cell(network, parse_way(word, steps), 2, LINK, steps) for word in (COUNTED_BASE, "onebit")]
    ways = [parse_way(f"{name}:every={every}", rounds) for name in (*OUTER, "model_averaging")]
    cells += [Cell(network, way, 2, where, rounds) for where in (HOSTS, LINK) for way in ways]
    inside = parse_way(f"diloco:every={every}", rounds)
    cells += [Cell(network, parse_way(COUNTED_BASE, steps), 4, LINK, steps, SHARDED)]
    return cells + [Cell(network, inside, 4, where, rounds, SHARDED) for where in (HOSTS, LINK)]


def _network(data: Path, batch: int, save_every: int, dtype: str) -> Network:
    settings = {**SETTINGS, "checkpoint.every": save_every, "precision.dtype": dtype}
    return Network("gpt-3.5m", "tiny", data, batch, {name: str(value) for name, value in settings.items()})


def with_earlier(cells: Sequence[Facts], about: Facts, path: Path) -> list[Facts]:
    """Return cells, and those of an earlier record that differ in nothing `about` says. Curves say enough."""
    found: dict[tuple[int, str], Facts] = {}
    now = {**describe(path.stem), **about}
    if path.exists():
        earlier = json.loads(path.read_text())
        if other := [key for key in ("machine", "versions", *about) if earlier.get(key) != now[key]]:
            print(f"{path}: another {', '.join(other)}: its {len(earlier['cells'])} trainings are left out")
        else:
            commit = earlier.get("commit") or earlier.get("committed_with")
            found = {
                (cell["workers"], cell["strategy"]): {"commit": commit, **cell} for cell in earlier["cells"]
            }
    for cell in cells:
        trimmed = {key: value for key, value in cell.items() if key not in BY_STEP}
        place = cell["workers"], cell["strategy"]
        if cell["status"] == "done" or found.get(place, {}).get("status") != "done":
            found[place] = {"date": now["date"], "commit": now["commit"], **trimmed}
    return list(found.values())


def judge_convergence(cells: Sequence[Facts]) -> Iterator[Facts]:
    """Compare validation losses at the end with that of all-reduce on as many workers."""
    losses = {(c["workers"], c["strategy"]): c["curve"][-1]["loss"] for c in cells if c["status"] == "done"}
    for (workers, word), loss in losses.items():
        if word != BASE and (workers, BASE) in losses:
            mark = NEAR if word in COMPRESSED else NEAR_OUTER
            yield _verdict(f"loss of {word} x{workers}", loss / losses[workers, BASE], mark, most=True)


def judge_link(outcomes: Sequence[CellResult]) -> Iterator[Facts]:
    """Compare bytes with those of all-reduce, and tokens/s with those of the same ranks without a limit."""
    found = {(o.cell.way.word, o.cell.layout, o.cell.link): o for o in outcomes if o.found}
    for (word, layout, where), outcome in found.items():
        base = found.get((COUNTED_BASE, layout, LINK))
        if where != LINK or word == COUNTED_BASE or outcome.found is None:
            continue
        name, h = f"{word} {layout}".strip(), outcome.cell.way.period
        if base and base.found and base.found.bytes_a_step and outcome.found.bytes_a_step:
            mark = FEWER_BYTES_OUTER * h if h > 1 else FEWER_BYTES
            yield _verdict(
                f"bytes saved by {name}", base.found.bytes_a_step / outcome.found.bytes_a_step, mark
            )
        free = found.get((word, layout, HOSTS))
        if free and free.found and "diloco" in word:
            speed = free.found.seconds_a_step / outcome.found.seconds_a_step
            yield _verdict(f"speed of {name}, of that without a limit", speed, UNHINDERED)


def _verdict(what: str, value: float, mark: float, *, most: bool = False) -> Facts:
    holds = value <= mark if most else value >= mark
    return {"what": what, "value": round(value, 4), "mark": mark, "holds": holds}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("convergence", "link"))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="convergence only")
    parser.add_argument("--steps", type=int, help=f"default: {DEFAULT_STEPS}")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences a step")
    parser.add_argument("--every", type=int, nargs="+", help="H; default: 50 and 100, for link 100")
    parser.add_argument("--only", nargs="+", help="strategies, in the words of the tables")
    parser.add_argument("--data", type=Path, help="a dataset; default: made below --runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/bench-gradsync"))
    parser.add_argument("--output", type=Path, default=RECORDS, help="folder of the record")
    wish = parser.parse_args()
    name = wish.part if wish.batch == BATCH else f"{wish.part}_{wish.batch}"
    runs = wish.runs.absolute() / name
    data = wish.data.absolute() if wish.data else make_data(wish.runs.absolute() / "data", TEXT)
    steps = wish.steps or DEFAULT_STEPS[wish.part]
    if wish.part == "convergence":
        cells = convergence(data, wish.batch, wish.workers, steps, wish.every or (50, 100))
    else:
        cells = link(data, wish.batch, steps, (wish.every or [100])[0])
    outcomes: list[CellResult] = []
    install_stop_handlers()
    try:
        wanted = [cell for cell in cells if not wish.only or cell.way.word in wish.only]
        for outcome in measure(wanted, runs):
            outcomes.append(outcome)  # not all at once: Ctrl-C may come
    finally:  # Ctrl-C leaves a record of what there is
        console = Console(width=None if sys.stdout.isatty() else 120)
        for table in tables(outcomes):
            console.print(table)
        records = [outcome.as_record() for outcome in outcomes]
        about: Facts = {"tokens_a_step": SEQ_LEN * wish.batch}
        if wish.part == "convergence":
            about |= {"steps": steps, "settings": SETTINGS, "data": open_dataset(data).fingerprint}
            records = with_earlier(records, about, wish.output / f"gradsync_{name}.json")
            verdicts = list(judge_convergence(records))
        else:
            verdicts = list(judge_link(outcomes))
        for verdict in verdicts:
            print("{holds!s:5}  {what}: {value} (mark {mark})".format(**verdict))
        figures = {"verdicts": verdicts, "cells": records}
        write_record(f"gradsync_{name}", {**about, **figures}, wish.output)
    return int(any(outcome.found is None for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
