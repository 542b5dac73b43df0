"""Measured figures in README, CHANGELOG and docs: the sentence of each, and its place in a record.

    python -m tools.figures              where pages and records differ, and figures that no record covers
    python -m tools.figures --write      put the figures of the records into the pages

For a new figure, yield page and sentence in `claims`, with `v(value, format)` where the figure stands.
What looks like one but is a setting, a limit or a formula goes into FACTS.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.records import FOLDER, ROOT, STRATEGIES

EXEMPT = ("LOG.md", "published-runs.md")  # a lab book; a page that tests/plan/test_published.py compares
OPEN, CLOSE = "\x02", "\x03"
VALUE = r"([^|;`]{1,60}?)"

NUMBER = r"(?<![\w./^\-])\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"[ -]?(?:%|percent\b)| ?(?:tokens/s|[KMG]i?B(?:/s)?|ms|us|s|min)\b|x\b"
    r"| (?:seconds|minutes|hours|times|thousand)\b|(?: \w+){1,2} (?:a|per) second\b"
)
FIGURE = re.compile(
    rf"{NUMBER}(?:{UNIT})"
    r"|(?<!torch )(?<!Python )(?<![\w./^\-])\d+\.\d+(?!\d*[.\w])"
    r"|(?<![\w.])\d+(?:\.\d+)?e-\d+"
)
CODE = re.compile(r"```.*?```|(?m:^ {4}(?! *[|-])[^\n]*$)|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)

# Settings, limits that tests hold, sizes of inputs, formulas and counts: text that is no measurement.
FACTS: dict[str, tuple[str, ...]] = {
    "README.md": ("torch (2.11 or newer)",),
    "CHANGELOG.md": ("more than 10 s", "30 s for 8 MiB", "limit of 10 s"),
    "docs/benchmarks.md": ( "on 300 MB of source code", "corpus of 10 GB", "needs 20 GB",
        "min |",  # tests/test_records.py compares them
        "of 1 GB", "1.5 billion", "needs 14 GB", "of 64 MB", "1 KB to 256 MB", "within 10 minutes",
        "180,000 tokens/s", "runs 64 MB", "reaches 0.9", "(10 minutes)", "(7 minutes)", "57 MB",
        "8.4 MB", "4.3 MB", "rate of 0.05", "momentum of 0.9", "at most 1.01", "at most 1.02",
        "5 % of the values", "2e-3", "1e-3", "4e-3", "20 times fewer", "0.9 H times", "0.9 of the tokens/s",
        "below 0.9", "longer than 5 s", "10 % faster", "95 % of the best", "99 % bootstrap", "2 % from 1",
        "4 KB to 16 MB", "more than 1e-5", "at most 5 % of it",
    ),
    "docs/distributed.md": ("64 MB",),
    "docs/failures.md": ("after 15 s", "300 s"),
    "docs/gpu.md": ("10 minutes", "430 to 490 thousand", "165 to 180 thousand", "5 seconds"),
    "docs/gradsync.md": (
        "25 times fewer", "64 % of a value", "20 times as long", "1.5 S", "0.7 | 0.9", "momentum of 0.9",
        "alpha of 0.5", "heard for 10 s", "8 MiB take longer than 30 s", "1.2 times the fastest",
    ),
    "docs/interop.md": ("5e-6", "1e-5", "at most 1 GiB", "64 MiB", "before 1.6"),
    "docs/planner.md": (
        "at most 90 %", "less than 10 s", "2 s |", "another s |", "2 s;", "15.9 %", "13,826 MiB", "11,927",
        "15,107 MiB", "1,281 MiB", "26.6 GB", "14.75 GiB", "5.6 | 6.6", "21.4 | 0.4", "0 | 4.6", "0 | 1.9",
        "0 | 1.3", "27.0 | 14.8", "11,869 MiB", "6,145 MiB", "6,238 MiB", "2.5 times", "0.8", "0.9", "2.2",
        "more than 10 %",
    ),
    "docs/layouts.md": ("a value has 4 bytes", "1e-5 of", "2e-6 of", "1e-2 of", "(0.50:"),
    "docs/models.md": (
        "0.8 M", "1.13 G", "4.09 G", "14.2 M", "12.3 M", "`eps` (1e-5)", "`momentum` (0.1)", "1.56 B",
        "8.3 B", "1.18 B (1.10 B", "N(0, 0.02)", "N(0, 0.02 /",
    ),
    "docs/prepare.md": (
        "12 MB, offline", "(5 %)", "up to 16 GiB", "sample of 32 MB", "more than 5 %", "50 times its size",
        "1 to 16 MB", "file of 1 GB", "Preparing 50 MB", "takes 17 times", "lines above 32 MiB",
        "line above 256 MiB", "| 32 MiB", "fields above 16 MiB",
        "256 times its compressed size; not checked if the text column has at most 32 MiB",
        "32 MiB, or 16 times", "16 GiB; above 64 MiB also 64 times", "| 256 MiB",
        "1 MB, 2,048 for 12 MB, 32,768 from 98 MB", "95 % of the ids", "least 100 times",
    ),
    "docs/recipes.md": ("between 1e-5 and 1e-4", "(default 0.95, in transformers 0.999)"),
    "docs/serve.md": (
        "256 KiB", "10 s until a request begins on a connection, and 10 s until", "30 s without", "(95 %)",
        "at most 2 s", "512 MiB of memory",
    ),
    "docs/several-machines.md": ("within 30 s",),
    "docs/web-data.md": (
        "`--max-memory 4GB` | memory for finding duplicates | 1GB", "more than 90 % of what it gets",
        "longer than 32 MiB is dropped", "up to 2 GiB for dumps", "`line too long` (4 MiB)", "| 8 MiB |",
        "arrive within 15 s", "again after 5 minutes", "up to 16 MiB a page", "more than 5 % of the bytes",
        "above 32 MiB is dropped", "at most 16 MiB |", "or more than 32 MiB", "longer than 32 KiB",
        "more than 16 MiB decoded", "out of memory (1 GiB)", "with 1 GiB of address space",
        "If at least 30 % of the letters",
        "| 0.1 | Gopher", "| 0.9 of the lines", "| 0.3 of the lines", "| 0.8 of the words",
        "0.2 of the characters",
        "| 0.3, 0.2 |", "0.2, 0.18, 0.16 of the characters", "0.15, 0.14, 0.13, 0.12, 0.11, 0.1 |",
        "30 % or more look like", "at least 30 % of their letters",
        "| 0.8 |", "threshold = 0.8", "0.95 | 1.000 | 1.000 | 1.000 | 0.998",
        "0.9 | 1.000 | 1.000 | 1.000 | 0.929",
        "0.8 | 0.924 | 0.998 | 1.000 | 0.399", "0.7 | 0.565 | 0.918 | 1.000 | 0.084",
        "0.6 | 0.211 | 0.615 | 0.979 | 0.012", "0.5 | 0.053 | 0.270 | 0.836 | 0.001",
        "0.3 | 0.001 | 0.014 | 0.204 | 0.000", "suits 0.7", "with 1 GB this is enough for 1.4 billion",
        "limited to 64 MiB", "On 300 MB of source", "10 GB of synthetic",
        "1.5 characters", "match is below 0.1 %", "`min_words_with_letters` | 0.8",
    ),
    "docs/training.md": (
        "2e-6", "1e-5", "1.6e13", "8e15", "compilation takes 20 s", "gets 30 s", "300,000 times",
        "no more than 30 s", "(above 20 %",
    ),
}  # fmt: skip


def v(value: Any, form: str = "") -> str:
    """Mark a figure of a claim."""
    return OPEN + format(value, form) + CLOSE


@functools.cache
def read(name: str) -> dict[str, Any]:
    """Return a record."""
    record: dict[str, Any] = json.loads((ROOT / FOLDER / f"{name}.json").read_text())
    return record


def claims() -> Iterator[tuple[str, str]]:
    """Yield each page with a sentence of it, its figures from records."""
    for part in (
        of_training,
        of_layouts,
        of_serving,
        of_data,
        of_strategies,
        of_advice,
        of_grid,
        of_link,
        of_losses,
        of_plans,
        of_networks,
    ):
        yield from part()


def of_training() -> Iterator[tuple[str, str]]:
    cpu = read("cpu_train")
    line = cpu["summary"]["cpu-30m"]
    yield (
        "docs/benchmarks.md",
        f"On two cores ({v(cpu['machine']['device'].removeprefix('CPU (').removesuffix(')'))}), Shoal has "
        f"{v(line['ratio_to_fastest_peer'], '.2f')} times the tokens/s of the fastest other system with "
        f"default settings ({v(line['fastest_peer'])}), and "
        f"{v(line['ratio_to_fastest_peer_with_settings'], '.2f')} times those of the fastest one",
    )
    best = line["shoal"]["dtype"]
    rates = {
        e["compiled"]: e["median_tokens_per_s"]
        for e in cpu["results"]
        if e["system"] == "shoal" and e["dtype"] == best
    }
    yield (
        "docs/training.md",
        f"6 layers of width 384 on two threads reached {v(rates[True] / rates[False], '.2f')} times the "
        f"tokens/s of uncompiled blocks, in {v(best)} ([record]",
    )
    peaks = {name: size / 1e9 for name, size in read("memory")["recompute_peak_bytes"].items()}
    for name, kept in (("none", "everything"), ("selective", "recomputed"), ("full", "layers")):
        yield "docs/training.md", f"{kept} | {v(peaks[name], '.1f')} GB |"
    yield (
        "CHANGELOG.md",
        f"with `full` the blocks of gpt2-medium hold {v(peaks['full'], '.1f')} GB at the peak of a pass over "
        f"8 x 256 tokens, instead of {v(peaks['none'], '.1f')} GB",
    )
    split = read("time_split")
    yield (
        "docs/training.md",
        f"the timing cost {v(100 * split['tiny']['cost_of_wall_time'], '.1f')} % of the tokens/s "
        f"with steps of {v(split['tiny']['processor_ms']['off'], '.0f')} ms, which is less than the noise of "
        f"that measurement. With steps of {v(split['small']['processor_ms']['on'], '.0f')} ms, no cost could "
        "be measured",
    )
    yield "docs/failures.md", f"takes {v(split['recorded_operation_us'], '.0f')} microseconds per operation"
    yield (
        "CHANGELOG.md",
        f"it takes at most {v(max(read('recovery')['seconds_from_kill_to_next_step']), '.2f')} s on "
        f"two cores",
    )


def of_layouts() -> Iterator[tuple[str, str]]:
    told = read("layouts")["summary"]
    yield (
        "docs/benchmarks.md",
        f"`tp2` has {v(told['tp2 / bare torch tp2'], '.2f')} times the tokens/s of tensor parallelism in "
        f"bare torch with default settings, and "
        f"{v(told['tp2 / bare torch tp2 with C library settings'], '.2f')} times those with the settings",
    )
    gpt2, llama = (run["seconds"] for run in read("parity")["runs"])
    yield "docs/layouts.md", f"took {v(gpt2, '.0f')} s for `tiny` and {v(llama, '.0f')} s for `tiny-llama`"
    runs = [run["largest"] for run in read("parity_matrix")["runs"]]
    losses = max(max(run["loss"], run["norm"]) for run in runs)
    gradients = max(run["gradient"] for run in runs)
    yield (
        "docs/layouts.md",
        f"by at most {v(losses, '.1e')} in losses and norms and {v(gradients, '.1e')} in gradients",
    )
    speed = read("collectives")["ranks"]["2"]["speed_of_backend"]["chunked_ring"]
    yield "docs/distributed.md", f"the chunked ring has {v(speed, '.2f')} times the speed of gloo's own"


def of_serving() -> Iterator[tuple[str, str]]:
    generate = read("generate")
    for shape, name in (
        ("tiny", "4 x 128, 1,000 ids"),
        ("small", "6 x 384, 50,257 ids"),
        ("gpt2", "12 x 768, 50,257 ids"),
    ):
        one, eight = (generate[shape][f"{count} sequences"] for count in (1, 8))
        unit = " tokens/s" * (shape == "tiny")
        cells = [
            f"{v(some['tokens_per_s']['shoal'], ',.0f')}{unit} | "
            f"{v(some['ratio_to_transformers_at_its_best'], '.2f')}"
            for some in (one, eight)
        ]
        yield (
            "docs/generate.md",
            f"| {name} | {' | '.join(cells)} | {v(generate[shape]['eight_beside_one'], '.2f')} |",
        )
    few, many = read("serve")["clients_8"], read("serve")["clients_64"]
    turns = sorted(turn["tokens_per_s"] for turn in few["turns"])
    alone = sorted(few["generate_tokens_per_s"])
    yield (
        "docs/serve.md",
        f"8 clients reach {v(few['ratio_to_generate'], '.2f')} of the tokens/s of `shoal generate` with a "
        f"batch of 8, measured in alternation ({v(turns[len(turns) // 2], '.0f')} against "
        f"{v(alone[len(alone) // 2], '.0f')} a second).",
    )
    yield (
        "docs/serve.md",
        f"16 rows: {v(many['tokens_per_s'], '.0f')} tokens/s and {v(many['requests'])} answers. No answer "
        "was lost or truncated, and each equalled the text of `shoal generate` for its prompt. The first "
        f"token came after {v(many['first_token_s']['p50'], '.1f')} s (median) and "
        f"{v(many['first_token_s']['p95'], '.1f')} s (95 %)",
    )


def of_data() -> Iterator[tuple[str, str]]:
    tokenise = read("tokenise")
    yield (
        "docs/prepare.md",
        f"encoding a text file of 1 GB with a BPE of 32,000 ids runs at "
        f"{v(tokenise['median_megabytes_per_s'], '.1f')} MB/s, {v(tokenise['ratio_to_tokenizers'], '.1f')} "
        f"times as fast as the tokenizers library. Preparing 50 MB with a newly trained BPE took "
        f"{v(tokenise['training_of_the_bpe_on_50_megabytes']['seconds'], '.0f')} s. Memory does not grow "
        f"with the corpus: the file of 1 GB took {v(tokenise['peak_bytes'] / 1e9, '.2f')} GB",
    )
    peaks = {step: size / 1e9 for step, size in read("large_corpus")["peak_bytes_of"].items()}
    yield (
        "docs/web-data.md",
        f"10 GB of synthetic JSON lines with `--max-memory 500MB` took {v(peaks['before'], '.2f')} GB of "
        f"memory in all processes together until duplicates were found, and {v(peaks['tokenise'], '.2f')} GB "
        "while they were tokenised",
    )
    dedup = read("dedup")
    times = dedup["datatrove"]["times_as_long"]
    yield (
        "docs/web-data.md",
        f"On 300 MB of source code, two processes compute signatures at "
        f"{v(dedup['signatures_megabytes_per_s'], '.0f')} MB/s, find near-duplicates at "
        f"{v(dedup['end_to_end_megabytes_per_s'], '.0f')} MB/s from files to decisions, and make a dataset "
        f"with all stages at {v(dedup['chain']['megabytes_per_s'], '.1f')} MB/s",
    )
    yield (
        "docs/web-data.md",
        f"datatrove takes {v(times['signatures'], '.0f')} times as long for signatures, and "
        f"{v(times['end_to_end'], '.0f')} times for all four stages of its pipeline",
    )


def of_strategies() -> Iterator[tuple[str, str]]:
    behind = {one["what"]: 100 * (one["value"] - 1) for one in read("gradsync_convergence")["verdicts"]}
    yield (
        "docs/gradsync.md",
        f"After 1,000 steps `onebit` is {v(behind['loss of onebit x2'], '.1f')} % behind all-reduce, "
        f"and `topk` {v(behind['loss of topk x2'], '.1f')} %.",
    )


def of_advice() -> Iterator[tuple[str, str]]:
    links = {one["link"]: one for one in read("advise")["links"]}
    fast, middle, slow = (
        v(links[name]["rank_correlation"], ".3f") for name in ("1gbit", "200mbit", "50mbit")
    )
    yield (
        "docs/gradsync.md",
        f"rank correlation of {fast} at 1 Gbit/s, {middle} at 200 Mbit/s and {slow} at 50 Mbit/s",
    )
    worst = max(
        links["50mbit"]["strategies"], key=lambda one: abs(one["predicted"]["step_s"] / one["measured_s"] - 1)
    )
    yield (
        "docs/gradsync.md",
        f"The largest error was that of `{v(worst['strategy'])}` at 50 Mbit/s: "
        f"{v(worst['predicted']['step_s'], '.2f')} s predicted, {v(worst['measured_s'], '.2f')} s measured.",
    )
    (late,) = (one["measured_s"] for one in links["200mbit"]["strategies"] if one["strategy"] == "async_sgd")
    yield "CHANGELOG.md", f"with 200 Mbit/s {v(late, '.2f')} s a step"


def speeds(name: str) -> dict[tuple[str, int, str], float]:
    """Return each cell's speed beside all-reduce, by network, workers and strategy."""
    seconds = {
        (c["network"], c["workers"], c["strategy"]): c["seconds_a_step"]
        for c in read(name)["cells"]
        if c["status"] == "done"
    }
    return {key: seconds[(*key[:2], "allreduce")] / taken for key, taken in seconds.items()}


def of_grid() -> Iterator[tuple[str, str]]:
    near, far = speeds("gradsync_grid"), speeds("gradsync_grid_1gbit")
    for network, name in (
        ("fcn-r", "FCN-R (14M parameters, 57 MB a step)"),
        ("gpt", "GPT (1M parameters)"),
    ):
        yield (
            "docs/benchmarks.md",
            f"| {name} | {v(near[network, 2, 'onebit'], '.2f')} | {v(near[network, 2, 'topk'], '.2f')} |",
        )
    owners, apart = (
        [speed for (_, workers, name), speed in near.items() if workers > 1 and name in names]
        for names in (("central_parallel", "device_sharded", "tree_update"), ("diloco",))
    )
    yield (
        "docs/benchmarks.md",
        f"owners have {v(min(owners), '.2f')} to {v(max(owners), '.2f')} times the speed of all-reduce "
        f"there, and `diloco` {v(min(apart), '.2f')} to {v(max(apart), '.2f')} times.",
    )
    ways = STRATEGIES.split(" ")[1:]
    for network, name in (("fcn-r", "FCN-R, 57 MB a step"), ("lstm", "LSTM, 8.4 MB"), ("gpt", "GPT, 4.3 MB")):
        yield (
            "docs/benchmarks.md",
            f"| {name} | {' | '.join(v(far[network, 2, way], '.2f') for way in ways)} |",
        )
    (late,) = (
        cell["curve"]
        for cell in read("gradsync_grid")["cells"]
        if (cell["network"], cell["workers"], cell["strategy"]) == ("fcn-r", 2, "async_sgd")
    )
    yield (
        "docs/benchmarks.md",
        f"its loss goes from {v(late[0]['loss'], '.1f')} to {v(late[-1]['loss'], '.1f')}.",
    )


def of_link() -> Iterator[tuple[str, str]]:
    record = read("gradsync_link")
    marks = {one["what"]: one["value"] for one in record["verdicts"]}
    taken = {
        (c["strategy"], c["layout"]): c["seconds_a_step"] for c in record["cells"] if c["link"] == "100mbit"
    }
    ring, sharded = "allreduce:algorithm=chunked_ring", "dp2*zero2x2"
    hosts = {
        c["strategy"]: c["seconds_a_step"]
        for c in record["cells"]
        if c["link"] == "hosts" and not c["layout"]
    }
    yield "docs/benchmarks.md", f"| chunked ring | 1 | {v(taken[ring, ''], '.3f')} | |"
    yield (
        "docs/benchmarks.md",
        f"| `onebit` | {v(marks['bytes saved by onebit'], '.1f')} | {v(taken['onebit', ''], '.3f')} | |",
    )
    for name in ("diloco", "streaming_diloco", "block_momentum"):
        word = f"{name}:every=100"
        yield (
            "docs/benchmarks.md",
            f"| `{name}`, H = 100 | {v(marks[f'bytes saved by {word}'], '.0f')} | "
            f"{v(taken[word, ''], '.3f')} | "
            f"{v(hosts[word] / taken[word, ''], '.3f')} |",
        )
    yield (
        "docs/benchmarks.md",
        f"| `{sharded}`: chunked ring between hosts | 1 | {v(taken[ring, sharded], '.3f')} | |",
    )
    word = f"diloco:every=100 {sharded}"
    yield (
        "docs/benchmarks.md",
        f"| `{sharded}`: `diloco` between hosts, H = 100 | {v(marks[f'bytes saved by {word}'], '.0f')} | "
        f"{v(taken['diloco:every=100', sharded], '.3f')} | "
        f"{v(marks[f'speed of {word}, of that without a limit'], '.3f')} |",
    )


def of_losses() -> Iterator[tuple[str, str]]:
    record = read("gradsync_convergence")
    found = {one["what"].removeprefix("loss of "): one for one in record["verdicts"]}

    def cell(words: list[str], workers: int) -> str:
        told = (found.get(f"{word} x{workers}") for word in words)
        return "; ".join(
            v(("{:.3f}" if one["holds"] else "**{:.3f}**").format(one["value"])) for one in told if one
        )

    losses = {c["workers"]: c["curve"][-1]["loss"] for c in record["cells"] if c["strategy"] == "allreduce"}
    yield (
        "docs/benchmarks.md",
        f"| all-reduce, the loss itself | {v(losses[2], '.3f')} | {v(losses[4], '.3f')} |",
    )
    rows = {
        "`int8`": ["int8"],
        "`onebit`; with 200 warm-up steps instead of 100": ["onebit", "onebit:warmup_steps=200"],
        "`topk`, 5 % of the values": ["topk"],
        "`powersgd`, rank 32; rank 4": ["powersgd:rank=32", "powersgd"],
        "`diloco`, H = 50; H = 100": ["diloco:every=50", "diloco:every=100"],
        "`block_momentum`, H = 50; H = 100": ["block_momentum:every=50", "block_momentum:every=100"],
        "`streaming_diloco`, 2 fragments, H = 50; H = 100": [
            "streaming_diloco:every=50",
            "streaming_diloco:every=100",
        ],
    }
    for name, words in rows.items():
        yield "docs/benchmarks.md", f"| {name} | {cell(words, 2)} | {cell(words, 4)} |"


def of_plans() -> Iterator[tuple[str, str]]:
    for name in ("gpt2", "gpt2-medium", "llama-160m", "gpt2-8b"):
        rows = [row for row in read("plan_memory")["rows"] if row["preset"] == name]
        errors = [abs(100 * row["error"]) for row in rows]
        middle, most = v(statistics.median(errors), ".1f"), v(max(errors), ".1f")
        name += " on 512 GPUs" * (name == "gpt2-8b")
        yield "docs/planner.md", f"| {name} | {v(len(rows))} | {middle} % | {most} % |"
    times = read("plan_time")
    for name, row in (times["steps"] | times["layouts"]).items():
        cells = [v(1000 * row[key], ".0f") for key in ("predicted_s", "measured_s")]
        cells += [f"{v(100 * row[key], '+.1f')} %" for key in ("error", "calibrated_error")]
        yield "docs/planner.md", f"| {name} | {' | '.join(cells)} |"
    yield "docs/planner.md", f"Of all pairs of the layouts, {v(times['pairs'])} differ by more than"
    yield "docs/planner.md", f"rank correlation (Kendall's) of {v(times['rank_correlation'], '.2f')}"


def of_networks() -> Iterator[tuple[str, str]]:
    page = "docs/benchmarks.md"

    def medians(name: str, *axes: str) -> dict[tuple[Any, ...], float]:
        return {
            tuple(row["cell"][axis] for axis in axes): statistics.median(row["samples"])
            for row in read(name)["rows"]
        }

    frameworks, modes = ("pytorch", "jax", "tensorflow", "paddle", "mxnet"), ("default", "tuned")
    found = medians("networks", "network", "framework", "batch", "threads", "mode")
    for name, mode in itertools.product(("fcn-r", "alexnet-r", "resnet-56", "lstm"), modes):
        cells = (v(1000 * found[name, framework, 128, 2, mode], ".0f") for framework in frameworks)
        yield page, f"| {name} | `{mode}` | {' | '.join(cells)} |"
    found = medians("networks_workers", "framework", "workers")
    for name in frameworks:
        one, two = (v(1000 * found[name, workers], ".0f") for workers in (1, 2))
        yield page, f"| {name} | {one} ms | {two} ms |"
    found = medians("networks_large", "network", "batch", "mode")
    for name, batch in itertools.product(("fcn-s", "alexnet-s", "resnet-50"), (16, 64)):
        usual, tuned = (v(found[name, batch, mode], ".2f") for mode in modes)
        yield page, f"| {name}, {batch} | {usual} s | {tuned} s |"
    for name, row in read("networks_trainer")["networks"].items():
        plain, with_settings = (v(ratio, ".2f") for ratio in row["ratio"].values())
        ours = v(1000 * row["median_s"]["shoal"], ".0f")
        yield page, f"| {name}, {row['batch']} | {ours} ms | {plain} | {with_settings} |"


@dataclass(frozen=True)
class Found:
    """A figure of a claim where a page has it."""

    page: str
    begin: int
    end: int
    said: str
    wanted: str


def locate(page: str, claim: str, text: str) -> list[Found] | str:
    """Return where a page has the figures of a claim, or what is wrong with its sentence."""
    parts = re.split(f"{OPEN}([^{CLOSE}]*){CLOSE}", claim)
    pattern = VALUE.join(r"\s+".join(map(re.escape, re.split(r"\s+", words))) for words in parts[::2])
    matches = list(re.finditer(rf"{pattern}(?!\.?\w)", text))
    if len(matches) != 1:
        said = " ".join(re.sub(f"[{OPEN}{CLOSE}]", "", claim).split())
        return f"{page}: {len(matches)} times this sentence, whatever its figures: {said}"
    (match,) = matches
    return [Found(page, *match.span(n + 1), match[n + 1], wanted) for n, wanted in enumerate(parts[1::2])]


def pages() -> dict[str, str]:
    """Return the pages whose figures need a record, by name."""
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files if file.name not in EXEMPT}


def uncovered(page: str, text: str, found: list[Found]) -> list[str]:
    """Name the figures of a page that are neither in a claim nor facts, and the facts that it has no more."""
    spans = [(one.begin, one.end) for one in found]
    complaints = []
    for fact in FACTS.get(page, ()):
        places = [match.span() for match in re.finditer(rf"(?<![\w.,]){re.escape(fact)}(?!\w)", text)]
        spans += places
        if not places:
            complaints.append(f"{page}: FACTS names {fact!r}, which the page does not say")
    prose = CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in FIGURE.finditer(prose):
        if not any(begin < match.end() and match.start() < end for begin, end in spans):
            line = text.count("\n", 0, match.start()) + 1
            complaints.append(f"{page}:{line}: {match[0]!r} has no record: add a claim, or name it in FACTS")
    return complaints


def check(write: bool = False) -> list[str]:
    """Return what is wrong; with `write` put the figures of the records into the pages first."""
    texts, complaints = pages(), []
    located: dict[str, list[Found]] = {page: [] for page in texts}
    for page, claim in claims():
        match locate(page, claim, texts[page]):
            case str(complaint):
                complaints.append(complaint)
            case found:
                located[page] += found
    for page, found in located.items():
        complaints += uncovered(page, texts[page], found)
        for one in sorted(found, key=lambda one: one.begin, reverse=True):
            if one.said == one.wanted:
                continue
            line = texts[page].count("\n", 0, one.begin) + 1
            if write:
                texts[page] = texts[page][: one.begin] + one.wanted + texts[page][one.end :]
                (ROOT / page).write_text(texts[page])
                print(f"{page}:{line}: {one.said} is now {one.wanted}")
            else:
                complaints.append(f"{page}:{line}: says {one.said!r}, the record {one.wanted!r}")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    complaints = check(parser.parse_args().write)
    print("\n".join(complaints) or "all figures are those of the records")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
