"""Lines of a report of the bench, drawn for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shoal.bench.read_records import Spread
from shoal.page.pictures import COLOURS, GRID, picture, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SERIES, _MOST_BANDS = 10, 4  # in one picture
_WIDE = 5  # a larger ratio of the last losses has a logarithmic scale
_STYLES = ("-", "--", ":")  # so that equal curves are all seen
_HEIGHT = 3.2  # inches


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
            colour = COLOURS[number % len(COLOURS)]
            style = _STYLES[number % 3] if scale == "linear" else "-"
            dot = "" if scale == "linear" else "o"
            axes.plot(xs, ys, style, marker=dot, markersize=4, color=colour, label=shortened(one.label))
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
        axes.grid(color=GRID)
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)

    rows = -(-min(len(series), MOST_SERIES) // 2)
    return picture(draw, _HEIGHT + 0.2 * rows)
