"""What `shoal plan` prints and draws (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.errors import counted
from shoal.models.counts import count_parameters, flops_per_token
from shoal.plan.memory import CATEGORIES
from shoal.plan.search import USABLE, Found, Plan, difference
from shoal.plan.step_time import INSIDE, RunCost
from shoal.runtime.startup import loading

_BAR = 30  # characters
_MOST_REJECTED = 8  # reasons that are shown
_WEIGHT_BYTES = 4  # weights are fp32


def answer(console: Console, name: str, plan: Plan, cost: RunCost) -> None:
    """Print in a line whether a configuration fits, and how long it takes."""
    w, device = plan.workload, plan.workload.cluster.device
    where = f"{w.cluster.world_size} x {device.name}"
    where += f" ({counted(w.cluster.nodes, 'node')})" if w.cluster.nodes > 1 else ""
    memory = f"{gigabytes(plan.memory.total_bytes)} of {gigabytes(device.memory_bytes)}"
    if plan.fits:
        price = f", ${cost.usd:,.0f}" if cost.usd is not None else ""
        mfu = f"; MFU {plan.time.mfu:.0%}" if plan.time.mfu is not None else ""
        text = (
            f"{name} fits on {where} and takes {duration(3600 * cost.hours)}{price} for "
            f"{counted(w.config.train.steps, 'step')}: {plan}; {seconds(plan.time.total)} a step, "
            f"{plan.time.tokens_per_s:,.0f} tokens/s{mfu}; memory {memory}"
        )
    else:
        text = f"{name} does not fit on {where}: {plan} needs {memory} a device"
    console.print(escape(text), soft_wrap=True)
    if plan.fits and plan.memory.total_bytes > USABLE * device.memory_bytes:
        console.print(f"less than {1 - USABLE:.0%} of the memory is left: a prediction may be off by more")


def plan(console: Console, plan: Plan, cost: RunCost) -> None:
    """Print parameters, memory by category at its peak, time by phase, and checkpoints."""
    w, train = plan.workload, plan.workload.config.train
    counts, peak = count_parameters(w.shape), plan.memory.peak
    flops = flops_per_token(w.shape, train.seq_len) * w.global_tokens
    every = w.config.checkpoint.every
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("parameters", f"{counts.total:,} in all, {own_parameters(plan):,} on a rank")
    table.add_row(
        "step",
        f"{train.global_batch_size:,} sequences = {w.global_tokens:,} tokens, {flops:.3g} FLOP, in "
        f"{counted(w.num_microbatches, 'micro-batch')} a rank, {w.dtype}",
    )
    saved = f"every {every:,} steps" if every else "at the end"
    table.add_row(
        "checkpoint", f"{gigabytes(cost.checkpoint_bytes)} {saved}; {gigabytes(cost.disk_bytes)} of disk"
    )
    console.print(table)
    rank = f" of the ranks at place {plan.memory.pp_rank} of the pipeline" if w.layout.pp > 1 else ""
    values = {name.replace("_", " "): float(peak.bytes.get(name, 0)) for name in CATEGORIES}
    _bars(console, f"memory{rank} at the peak, {peak.name}", values, float(peak.total), gigabytes)
    inside = " (in forward, backward)"
    phases = {name + inside * (name in INSIDE): value for name, value in plan.time.phases.items()}
    _bars(console, "time of a step", phases, plan.time.total, seconds)


def found(console: Console, found: Found) -> None:
    """Print the ranked layouts with their differences, and why the others are out."""
    best = found.ranked[0]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("layout", "step", "GB", "against the first"):
        table.add_column(heading, justify="right" if heading in ("step", "GB") else "left", overflow="fold")
    for each in found.ranked:
        against = f"{each.time.total / best.time.total:.2f} times: {difference(each, best)}"
        size = f"{each.memory.total_bytes / 1e9:,.1f}"
        table.add_row(escape(str(each)), seconds(each.time.total), size, against if each is not best else "")
    console.print(table)
    console.print(
        f"{found.num_candidates:,} layouts: {found.num_rejected:,} rejected, {found.num_slower:,} slower"
    )
    for one in found.rejected[:_MOST_REJECTED]:
        console.print(escape(f"  {one.count:,} rejected, such as: {one.sentence}"), soft_wrap=True)
    if len(found.rejected) > _MOST_REJECTED:
        console.print(f"  and {len(found.rejected) - _MOST_REJECTED} other reasons (--json has all)")


def simulation(console: Console, plan: Plan) -> None:
    """Run a step of the real model on tensors without memory; print its peak beside the predicted one."""
    with loading():
        from shoal.plan.simulate import simulate

    layout = plan.workload.layout
    measured = simulate(plan.workload, plan.memory.pp_rank * layout.dp * layout.tp)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("at the peak", "predicted", "simulated"):
        table.add_column(heading, justify="left" if heading == "at the peak" else "right")
    here, there = plan.memory.peak.bytes, measured.peak.bytes
    for name in CATEGORIES[:-2]:  # neither the allocator nor the context is simulated
        if here.get(name) or there.get(name):
            table.add_row(name.replace("_", " "), gigabytes(here.get(name, 0)), gigabytes(there.get(name, 0)))
    table.add_row("all", gigabytes(plan.memory.peak_bytes), gigabytes(measured.peak_bytes))
    console.print(table)


def record(found: Found) -> dict[str, Any]:
    """Return the outcome of a search as plain values."""
    best = found.ranked[0]
    return {
        "candidates": found.num_candidates,
        "slower": found.num_slower,
        "ranked": [
            {
                "settings": str(each),
                "layout": str(each.workload.layout),
                "micro_batch_size": each.workload.config.train.micro_batch_size,
                "recompute": each.workload.config.train.recompute,
                "step_s": each.time.total,
                "phases": each.time.phases,
                "total_bytes": each.memory.total_bytes,
                "difference": difference(each, best),
            }
            for each in found.ranked
        ],
        "rejected": [{"count": one.count, "reason": one.sentence} for one in found.rejected],
    }


def draw(plan: Plan, name: str, path: Path) -> None:
    """Plot the memory over a step, by category, with the device's."""
    from matplotlib.figure import Figure

    from shoal.page.pictures import COLOURS

    moments = plan.memory.moments
    used = [c for c in CATEGORIES if any(moment.bytes.get(c) for moment in moments)]
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.add_subplot()
    heights = [[moment.bytes.get(category, 0) / 1e9 for moment in moments] for category in used]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(used))]
    labels = [category.replace("_", " ") for category in used]
    axes.stackplot(range(len(moments)), heights, labels=labels, colors=colours, step="mid")
    limit, peak = plan.workload.cluster.device.memory_bytes / 1e9, plan.memory.total_bytes / 1e9
    if limit < 3 * peak:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label="memory of the device")
    every = max(1, len(moments) // 16)
    places = sorted({*range(0, len(moments), every), moments.index(plan.memory.peak)})
    axes.set_xticks(places, [moments[i].name for i in places], rotation=40, ha="right", fontsize=8)
    axes.set(ylabel="GB", title=f"{name}, {plan}: memory of a rank over a step", xlim=(0, len(moments) - 1))
    figure.legend(loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=120)


def own_parameters(plan: Plan) -> int:
    """Return the parameters that a rank holds between steps."""
    return plan.memory.moments[0].bytes["weights"] // _WEIGHT_BYTES


def gigabytes(num_bytes: float) -> str:
    """Return 1.5 GB, or 12.3 MB."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def seconds(value: float) -> str:
    """Return 1.5 s, or 12.3 ms."""
    return f"{value:,.3g} s" if value >= 0.9995 else f"{value * 1e3:,.3g} ms"


def duration(value: float) -> str:
    """Return the largest of seconds, minutes, hours and days, with a decimal."""
    for least, size, unit in ((2 * 86400, 86400, "days"), (3600, 3600, "hours"), (60, 60, "minutes")):
        if value >= least:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.1f} s"


def _bars(console: Console, title: str, values: Mapping[str, float], total: float, words: Any) -> None:
    """Print values, each with a bar of its share; those that are nothing are left out."""
    console.print(f"\n{escape(title)}: {words(total)}", soft_wrap=True)
    table = Table.grid(padding=(0, 1, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in values.items():
        if value > 0:
            table.add_row(name, words(value), "█" * round(_BAR * value / total) + f" {value / total:.0%}")
    console.print(table)
