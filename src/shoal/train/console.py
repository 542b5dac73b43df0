"""What the console shows of a run: a line a log step that fits 80 columns; all the rest with --verbose."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from shoal.runtime.log import wrapped
from shoal.train.clock import PHASES

_WIDTH, _VERBOSE_WIDTH = 80, 120
_SLOW = 2.0  # times as long as the fastest rank computes
_WAITING = 0.2  # of a step, for data


def step_lines(line: Mapping[str, Any], before: Mapping[str, Any], steps: int, unit: str) -> str:
    """Return the line of a log step, and indented below it what is unusual since the log step `before`."""
    rate = line[f"{unit}_per_s"]
    per_s = f"{rate:,.0f}" if rate < 1e6 else f"{rate / 1e6:.2f}M"
    loss = f"{line['loss']:.4f}" if abs(line["loss"]) < 1000 else f"{line['loss']:.3g}"
    shown = (
        f"step {line['step']:>{len(str(steps))}}/{steps}  loss {loss}  lr {line['lr']:.2e}  "
        f"{per_s} {unit}/s  {line['left']} left"
    )
    return "\n".join((shown, *(wrapped(f"  {note}", _WIDTH, "  ") for note in _unusual(line, before))))


def _unusual(line: Mapping[str, Any], before: Mapping[str, Any]) -> Iterable[str]:
    if left_out := line["skipped"] - before.get("skipped", 0):
        yield f"{left_out} step{'s' * (left_out > 1)} skipped, {line['skipped']} in all"
    if line["loss_scale"] != (scale := before.get("loss_scale", line["loss_scale"])):
        yield f"loss scale {line['loss_scale']:g} (was {scale:g})"
    if not before:  # what comes once, such as compilation, is in the first step
        return
    if (waiting := line["data_ms"] / line["step_ms"]) > _WAITING:
        yield f"{waiting:.0%} of the step is waiting for data"
    if line["most_busy_ms"] > _SLOW * line["least_busy_ms"]:
        yield (
            f"rank {line['most_busy_ms_rank']} computes {line['most_busy_ms']:.0f} ms a step, "
            f"rank {line['least_busy_ms_rank']} {line['least_busy_ms']:.0f} ms"
        )


def details(line: Mapping[str, Any], world_size: int) -> str:
    """Return the rest of what is known of a log step, in lines of at most 120 columns."""
    mfu, basis = (line["mfu"], "peak") if line["mfu"] is not None else (line["mfu_measured"], "matmul")
    memory = "/".join(f"{line[f'{name}_bytes'] / 1e9:.2f}" for name in ("allocated", "peak", "reserved"))
    phases = ", ".join(
        f"{name} {line[f'{name}_ms'] / line['step_ms']:.0%}"
        for name in PHASES
        if name not in ("tp", "shard", "bubble") or line[f"{name}_ms"]
    )
    rows = [
        f"{line['step_ms']:.0f} ms a step: {phases}",
        f"gradient norm {line['grad_norm']:.3f}, MFU {mfu:.0%} of {basis}, memory {memory} GB",
    ]
    if world_size > 1:
        rows.append(
            f"by rank: peak {line['least_peak_bytes'] / 1e9:.2f} to {line['most_peak_bytes'] / 1e9:.2f} GB "
            f"(most: {line['most_peak_bytes_rank']}), busy {line['least_busy_ms']:.0f} to "
            f"{line['most_busy_ms']:.0f} ms (most: {line['most_busy_ms_rank']})"
        )
    return "\n".join(f"  {row}" for row in rows)


def table(rows: Iterable[tuple[str, str]], *, verbose: bool) -> str:
    """Return rows of name and value, each value wrapped beside its name."""
    width = _VERBOSE_WIDTH if verbose else _WIDTH
    return "\n".join(wrapped(f"  {name:<12} {value}", width, " " * 15) for name, value in rows)


def text_sample(step: int, text: str) -> str:
    """Return generated text, in which there may be anything, as indented lines."""
    words = " ".join(text.split())
    printable = "".join(letter if letter.isprintable() else "\ufffd" for letter in words)
    wide = any(east_asian_width(letter) in "FW" for letter in printable)  # two columns each
    width = _WIDTH // 2 if wide else _WIDTH
    return f"step {step}: sample\n" + textwrap.indent(textwrap.fill(printable, width - 2), "  ")


def short_path(path: Path | str) -> str:
    """Return a path below the current folder as one would type it there; any other one as it is."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def duration(seconds: float) -> str:
    """Return 0:09, 1:02:03, or from 100 hours on the days."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours / 24:.1f} days"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
