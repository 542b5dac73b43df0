"""The loss curve as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from shoal.runtime.files import disk_error
from shoal.runtime.log import log


def draw_curve(lines: list[dict[str, Any]], path: Path, unit: str) -> Path | None:
    """Draw training and validation loss over `unit` into a PNG; None, and a sentence, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no loss curve: matplotlib is not installed (pip install 'shoal[report]')")
        return None
    from matplotlib.figure import Figure

    steps = [line for line in lines if _holds(line, unit) and _holds(line, "loss")]
    train = [(line[unit], line["loss"]) for line in steps]
    place_of = {line["step"]: line[unit] for line in steps}
    validation = [
        (place_of[line["step"]], line["validation_loss"])
        for line in lines
        if _holds(line, "validation_loss") and line["step"] in place_of
    ]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel=unit, ylabel=f"loss (nats per {unit[:-1]})", title=path.parent.name)
    axes.plot(*zip(*train, strict=True), linewidth=1, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), marker="o", markersize=3, label="validation")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:  # the run is done and saved: no picture is no failure
        log.warning(f"no loss curve: {disk_error(error, path)}")
        return None
    return path


def _holds(line: dict[str, Any], name: str) -> bool:
    """Say whether a line has a figure of this name that can be drawn; somebody may have edited the file."""
    figure = line.get(name)
    return isinstance(figure, int | float) and not abs(figure) > 1e300
