"""The loss curve as a picture."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np

from shoal.runtime.files import disk_error
from shoal.runtime.log import log

_REST = 50  # times as long as a drawing took, nothing is drawn: training waits for it at most 2 % of the time
_SMOOTH = 50  # the mean of a 50th of all steps around each
_POINTS = 2000  # of the training loss that are drawn


class Curve:
    """Training and validation loss over the steps, drawn as often as that takes little of the time."""

    def __init__(self, path: Path, unit: str) -> None:
        self._path, self._unit = path, unit
        self._train: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []
        self._rest_until = 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Take what a line of metrics.jsonl has for the curve; somebody may have edited the file."""
        for name, points in (("loss", self._train), ("validation_loss", self._validation)):
            figure = line.get(name)
            if isinstance(figure, int | float) and abs(figure) < 1e300:
                points.append((line["step"], figure))

    def draw_if_time(self) -> None:
        """Draw, unless that was done a moment ago or matplotlib is not installed."""
        began = time.monotonic()
        if began >= self._rest_until and importlib.util.find_spec("matplotlib"):
            self.draw()
            self._rest_until = time.monotonic() + _REST * (time.monotonic() - began)

    def draw(self) -> bool:
        """Draw into a PNG; False where that cannot be, which is told, or no step was taken."""
        if not self._train:
            return False
        if importlib.util.find_spec("matplotlib") is None:
            log.info("no loss curve: matplotlib is not installed (pip install 'shoal[report]')")
            return False
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        title, label = self._path.parent.name, f"loss (nats per {self._unit[:-1]})"
        axes = figure.add_subplot(xlabel="step", ylabel=label, title=title)
        steps, losses = np.array(self._train).T
        every = -(-len(steps) // _POINTS)
        axes.plot(steps[::every], losses[::every], color="C0", alpha=0.25, linewidth=0.8)
        axes.plot(*_smoothed(steps, losses, every), color="C0", label="training, smoothed")
        if self._validation:
            axes.plot(*np.array(self._validation).T, color="C1", marker="o", markersize=4, label="validation")
        axes.grid(alpha=0.3)
        axes.legend()
        try:
            figure.savefig(self._path, dpi=120)
        except OSError as error:  # training and its checkpoints are all right: no picture is no failure
            log.warning(f"no loss curve: {disk_error(error, self._path)}")
            return False
        return True


def _smoothed(steps: np.ndarray, losses: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and mean losses of the steps around each, fewer of them at the ends."""
    reach = len(losses) // _SMOOTH // 2
    sums = np.concatenate(([0.0], losses.cumsum()))
    places = np.arange(0, len(losses), every)
    first, last = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(losses))
    return steps[places], (sums[last] - sums[first]) / (last - first)
