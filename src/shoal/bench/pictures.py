"""Pictures of a report, each an SVG in a data URI. Names are drawn as they are, not as formulas."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shoal.bench.read_records import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SERIES, _MOST_BANDS = 10, 4  # in one picture
_WIDE = 5  # a larger ratio of the last losses has a logarithmic scale
_COLOURS = (
    *("#1f5fa8", "#d1652c", "#2b8a5b", "#8a4f9e", "#b58a00"),
    *("#5b6673", "#c23b5a", "#3aa3b5", "#7a4b2a", "#e08aa8"),
)
_STYLES = ("-", "--", ":")  # so that equal curves are all seen
_INK, _GRID = "#30363d", "#e3e6ea"
_SIZE = (4.8, 3.2)  # inches
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


@dataclass(frozen=True)
class Series:
    """Line of a picture; its band goes from p5 to p95."""

    label: str
    points: Sequence[tuple[float, Spread]]
    mark: float | None = None  # the x at which a ring is drawn


def remark(series: Sequence[Series]) -> str:
    """Say what the caption of `lines` must: what bands are, and how many lines are not drawn."""
    if len(series) > MOST_SERIES:
        return f" The first {MOST_SERIES} of {len(series)}."
    wide = any(y.low < y.high for one in series for _, y in one.points)
    return " Bands: p5 to p95." if wide and len(series) <= _MOST_BANDS else ""


def lines(
    series: Sequence[Series],
    xlabel: str,
    ylabel: str,
    *,
    scale: Literal["linear", "log", "values"] = "values",
) -> str:
    """Draw lines; the scale `values` has its ticks at the measured values, by powers of 2."""

    def draw(axes: Axes) -> None:
        places = sorted(one.label for one in series)  # a label has one colour in pictures of the same labels
        for one in series[:MOST_SERIES]:
            number = places.index(one.label)
            xs, ys = [x for x, _ in one.points], [y.median for _, y in one.points]
            colour = _COLOURS[number % len(_COLOURS)]
            style = _STYLES[number % 3] if scale == "linear" else "-"
            dot = "" if scale == "linear" else "o"
            axes.plot(xs, ys, style, marker=dot, markersize=4, color=colour, label=_short(one.label))
            if len(series) <= _MOST_BANDS:
                lows, highs = [y.low for _, y in one.points], [y.high for _, y in one.points]
                axes.fill_between(xs, lows, highs, color=colour, alpha=0.13, linewidth=0)
            if one.mark in xs:
                height = ys[xs.index(one.mark)]
                axes.plot(one.mark, height, "o", color=colour, markersize=11, markerfacecolor="none")
        if scale == "values":
            values = sorted({x for one in series for x, _ in one.points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
        if scale == "log":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        ends = [one.points[-1][1].median for one in series]
        if scale == "linear" and max(ends) > _WIDE * min(ends) > 0:  # one that diverges
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(color=_GRID)
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)

    rows = -(-min(len(series), MOST_SERIES) // 2)
    return _picture(draw, _SIZE[1] + 0.2 * rows)


def bars(labels: Sequence[str], parts: dict[str, Sequence[float]], notes: Sequence[str], xlabel: str) -> str:
    """Draw a bar for each label, made of parts one after the other, with a note at its end."""

    def draw(axes: Axes) -> None:
        places, ends = range(len(labels)), [0.0] * len(labels)
        colours = ("#1f5fa8", "#b9cbe2") if len(parts) < 3 else _COLOURS
        for (name, widths), colour in zip(parts.items(), colours, strict=False):
            axes.barh(places, widths, left=ends, color=colour, height=0.62, label=name)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for place, end, note in zip(places, ends, notes, strict=True):
            axes.annotate(note, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
        axes.set_yticks(places, [_short(label) for label in labels])
        axes.set(xlabel=xlabel, xlim=(0, 1.3 * max(ends)))
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=_GRID)
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)

    return _picture(draw, 1.5 + 0.3 * len(labels) + 0.1 * len(parts))


def _short(label: str) -> str:
    return label if len(label) <= 30 else f"{label[:29]}…"


def _picture(draw: Callable[[Axes], None], height: float) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        axes = figure.add_subplot(axisbelow=True)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
