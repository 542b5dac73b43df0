"""Predicted against measured step times on this CPU, and the order of layouts on two processes.

Measurements of the machine (`shoal plan --measure`, in brief) and turns of training runs alternate; all pairs
and their medians are in the record. Every run is a `shoal train` whose processes share the cores; the others
stand still. Then the steps of every other round, 20 by default, calibrate, and those of the rest judge.

    python -m benchmarks.plan_time [--rounds 8] [--steps 5] [--measure-s 30] [--part steps layouts]
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.layouts import CPU, SKIPPED, SMALL, Running, start
from benchmarks.record import RECORDS, write_record
from shoal.config.layout import parse_layout, under
from shoal.config.load import load_config
from shoal.models.shape import resolve_shape
from shoal.plan.calibration import add_measurement, calibrated
from shoal.plan.machine import HERE, Machine
from shoal.plan.measure_machine import measure
from shoal.plan.step_time import PHASES, StepTime, step_time
from shoal.plan.workload import Workload
from tests.tiny_dataset import write_dataset

SIZES = {
    "small": {"n_layers": 4, "d_model": 128, "n_heads": 4, "seq_len": 128, "global_batch_size": 16},
    "medium": {"n_layers": 5, "d_model": 256, "n_heads": 4, "seq_len": 256, "global_batch_size": 8},
    "large": {"n_layers": 6, "d_model": 384, "n_heads": 6, "seq_len": 256, "global_batch_size": 4},
}
LAYOUTS = (
    "dp2",
    "zero1x2",
    "zero2x2",
    "zero3x2",
    "tp2",
    "tp2+sp",
    "pp2" + SMALL,
    "pp2+gpipe" + SMALL,
    "dp2" + SMALL,
)
APART = 0.1  # layouts are ranked where they differ by more


def settings() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the words and the work of each run by name."""
    found = {}
    for size, words, recompute in itertools.product(SIZES, ("1", "dp2"), ("none", "full")):
        work = CPU | SIZES[size] | {"device": "cpu", "recompute": recompute, "split": ()}
        work["threads"] = 0  # as `shoal train` chooses
        ranks = 2 if words == "dp2" else 1
        work["micro_batch_size"] = work["global_batch_size"] // ranks // 2
        found[f"{size} {words} {recompute}"] = (words, work)
    return found


def layouts() -> dict[str, tuple[str, dict[str, Any]]]:
    work = CPU | SIZES["medium"] | {"device": "cpu", "micro_batch_size": 4, "small_micro_batch_size": 1}
    return {words: (words, work) for words in LAYOUTS}


def workload_of(words: str, work: dict[str, Any], machine: Machine) -> Workload:
    """Return what the planner is asked for a run."""
    layout = parse_layout(words.split()[0])
    names = ("n_layers", "d_model", "n_heads")
    micro = work[f"{'small_' * words.endswith(SMALL)}micro_batch_size"]
    train = {name: work[name] for name in ("seq_len", "global_batch_size")}
    train |= {"micro_batch_size": micro, "compile": "off", "recompute": work.get("recompute", "none")}
    model = {name: work[name] for name in names} | {"max_seq_len": work["seq_len"]}
    parallel = {"split": tuple(work["split"]) if layout.pp > 1 else ()}
    config = load_config("gpt2", {"model": model, "train": train, "parallel": parallel})
    config = under(
        config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)}), layout
    )
    shape = resolve_shape(config.model, work["vocab_size"])
    return Workload(config, shape, layout, machine.cluster(layout.world_size), work["dtype"])


def predict(words: str, work: dict[str, Any], machine: Machine) -> StepTime:
    ranks = parse_layout(words.split()[0]).world_size
    return step_time(workload_of(words, work, machine), machine.rates(ranks, work["dtype"]))


def take_turns(
    runs: dict[str, tuple[str, dict[str, Any]]], wish: argparse.Namespace, folder: Path
) -> tuple[list[Machine], dict[str, list[list[dict[str, Any]]]]]:
    """Return a measurement of the machine for each round, and each run's steps by round."""
    ids = np.random.default_rng(0).integers(0, CPU["vocab_size"] - 1, 600_000)
    data = write_dataset(folder / "data", {"train": [ids]}, CPU["vocab_size"], CPU["vocab_size"] - 1)
    running: dict[str, Running] = {}
    machines = []
    try:
        for number, (name, (words, work)) in enumerate(runs.items()):
            running[name] = start(words, work, data, folder / f"run-{number}")
            running[name].turn(1, SKIPPED)
            running[name].samples.clear()
        for repeat in range(wish.rounds):
            machines.append(measure(wish.measure_s, folder))
            for name in list(runs)[repeat % len(runs) :] + list(runs)[: repeat % len(runs)]:
                running[name].turn(wish.steps, 1)
            print(f"round {repeat + 1} of {wish.rounds} is done", flush=True)
    finally:
        for one in running.values():
            one.end()
    return machines, {name: one.samples for name, one in running.items()}


def compare(
    words: str,
    work: dict[str, Any],
    machines: list[Machine],
    samples: list[list[dict[str, Any]]],
    folder: Path,
) -> dict[str, Any]:
    """Return predicted and measured medians by phase, before and after calibration."""
    each = [predict(words, work, machine) for machine in machines]
    phases = {name: statistics.median(one.phases[name] for one in each) for name in PHASES}
    told = StepTime(phases)
    first, second = ([line for lines in samples[start::2] for line in lines] for start in (0, 1))
    setting = f"{words} {work['d_model']} {work.get('recompute')}"
    middle = {name: statistics.median(line[f"{name}_s"] for line in first) for name in PHASES}
    first_s, second_s = (statistics.median(line["seconds"] for line in part) for part in (first, second))
    known = {"seconds": first_s, "steps": len(first), "setting": setting, "folder": folder}
    add_measurement(HERE, work["dtype"], phases, middle, **known)
    after = calibrated(told, HERE, work["dtype"], setting=setting, folder=folder)
    measured_s = statistics.median(line["seconds"] for line in first + second)
    return {
        "predicted_s": round(told.total, 5),
        "measured_s": round(measured_s, 5),
        "error": round(told.total / measured_s - 1, 4),
        "error_by_round": [
            round(one.total / statistics.median(line["seconds"] for line in lines) - 1, 4)
            for one, lines in zip(each, samples, strict=True)
        ],
        "calibrated_s": round(after.total, 5),
        "judged_s": round(second_s, 5),
        "calibrated_error": round(after.total / second_s - 1, 4),
        "phases_s": {name: [round(phases[name], 5), round(middle[name], 5)] for name in PHASES},
        "step_s": [[round(line["seconds"], 5) for line in lines] for lines in samples],
    }


def rank_correlation(rows: dict[str, dict[str, Any]]) -> tuple[float, int]:
    """Return Kendall's coefficient over the pairs that differ by more than APART, and their number."""
    pairs = [
        [math.log(first[key] / second[key]) for key in ("predicted_s", "measured_s")]
        for first, second in itertools.combinations(rows.values(), 2)
    ]
    signs = [np.sign(told * seen) for told, seen in pairs if abs(seen) > math.log1p(APART)]
    return float(sum(signs)) / max(1, len(signs)), len(signs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--measure-s", type=float, default=30.0)
    parser.add_argument("--part", nargs="+", choices=["steps", "layouts"], default=["steps", "layouts"])
    parser.add_argument("--output", type=Path, default=RECORDS / "plan_time.json")
    wish = parser.parse_args()
    figures: dict[str, Any] = {"rounds": wish.rounds, "steps_a_turn": wish.steps, "measure_s": wish.measure_s}
    for part in wish.part:
        runs = settings() if part == "steps" else layouts()
        with tempfile.TemporaryDirectory(prefix="plan-time-") as name:
            machines, samples = take_turns(runs, wish, Path(name))
            rows = {
                key: compare(words, work, machines, samples[key], Path(name))
                for key, (words, work) in runs.items()
            }
        figures[part] = rows
        for key, row in rows.items():
            print(f"{key:32s} {row['predicted_s']:.4f} {row['measured_s']:.4f} {row['error']:+.1%}", end="")
            print(f"  calibrated {row['calibrated_error']:+.1%}")
        if part == "layouts":
            correlation, pairs = rank_correlation(rows)
            figures |= {"rank_correlation": round(correlation, 4), "pairs": pairs}
        else:
            figures["largest_error"] = max(abs(row["error"]) for row in rows.values())
            figures["largest_calibrated_error"] = max(abs(row["calibrated_error"]) for row in rows.values())
    print({key: value for key, value in figures.items() if not isinstance(value, dict)})
    write_record(wish.output.stem, figures, wish.output.parent)


if __name__ == "__main__":
    main()
