"""Pictures of a page, each an SVG in a data URI. Names are drawn as they are, not as formulas."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    *("#1f5fa8", "#d1652c", "#2b8a5b", "#8a4f9e", "#b58a00"),
    *("#5b6673", "#c23b5a", "#3aa3b5", "#7a4b2a", "#e08aa8"),
)
_INK, GRID = "#30363d", "#e3e6ea"
_WIDTH = 4.8  # inches
_SETTINGS: dict[Any, Any] = {
    "lines.linewidth": 1.6,
    "svg.hashsalt": "shoal",
    "text.parse_math": False,
    "font.size": 10,
    "axes.edgecolor": "#a8b0b9",
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def bars(
    labels: Sequence[str], parts: Mapping[str, Sequence[float]], notes: Sequence[str], xlabel: str
) -> str:
    """Draw a bar for each label, made of parts one after the other, with a note at its end."""

    def draw(axes: Axes) -> None:
        places, ends = range(len(labels)), [0.0] * len(labels)
        colours = ("#1f5fa8", "#b9cbe2") if len(parts) < 3 else COLOURS
        for (name, widths), colour in zip(parts.items(), colours, strict=False):
            axes.barh(places, widths, left=ends, color=colour, height=0.62, label=name)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for place, end, note in zip(places, ends, notes, strict=True):
            axes.annotate(note, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
        axes.set_yticks(places, [shortened(label) for label in labels])
        axes.set(xlabel=xlabel, xlim=(0, 1.3 * max(ends)))
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=GRID)
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)

    return picture(draw, 1.5 + 0.3 * len(labels) + 0.1 * len(parts))


def shortened(label: str) -> str:
    """Return a label of at most 30 characters."""
    return label if len(label) <= 30 else f"{label[:29]}…"


def picture(draw: Callable[[Axes], None], height: float) -> str:
    """Return what `draw` draws, in a height in inches, as a data URI."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.add_subplot(axisbelow=True)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
