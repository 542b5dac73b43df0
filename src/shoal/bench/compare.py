"""`shoal bench compare`: which rows of two records differ by more than their noise."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from shoal.bench.read_records import Record, done, load
from shoal.bench.screen import make_table
from shoal.errors import InputError, counted

_FEWEST = 5  # samples of each; of fewer, no interval is told
_RESAMPLES, _CONFIDENCE, _SEED = 2_000, 0.99, 1234
_NEGLIGIBLE = 1.02  # a ratio within 1 / this and this is no difference
RULE = (
    f"The ratio is that of the medians, B / A. Its interval holds {_CONFIDENCE:.0%} of the ratios "
    f"of {_RESAMPLES:,} pairs of resampled rows (bootstrap). A row is slower or faster if all of it is "
    f"more than {_NEGLIGIBLE - 1:.0%} from 1."
)


@dataclass(frozen=True)
class Verdict:
    """Seconds of B by those of A, the ends of the ratio's interval, and what follows."""

    word: str
    ratio: float
    low: float = np.nan
    high: float = np.nan


def judge(a: Sequence[float], b: Sequence[float]) -> Verdict:
    """Compare two rows' seconds a step. The same samples give the same verdict."""
    ratio = float(np.median(b) / np.median(a))
    if min(len(a), len(b)) < _FEWEST:
        return Verdict("too few samples to say", ratio)
    rng = np.random.default_rng(_SEED)
    medians = [np.median(rng.choice(np.asarray(x), (_RESAMPLES, len(x))), axis=1) for x in (a, b)]
    low, high = map(
        float, np.quantile(medians[1] / medians[0], [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    )
    word = "slower" if low > _NEGLIGIBLE else "faster" if high < 1 / _NEGLIGIBLE else "no difference"
    return Verdict(word, ratio, low, high)


def command(first: Path, second: Path, fail_above: float | None) -> int:
    """Print a line a row; return 1 if a row of the second record is clearly slower than `fail_above`."""
    if fail_above is not None and not 1 <= fail_above < 1e6:
        raise InputError(f"--fail-above {fail_above:g}", hint="give a ratio of 1 or more, such as 1.05")
    a, b = load(first), load(second)
    if a.kind != b.kind or not (a.timed and b.timed):
        raise InputError(
            f"{first} ({a.name}) and {second} ({b.name}) have no samples of the same kind of rows",
            hint="compare two records of shoal bench networks, or two of shoal bench gradsync",
        )
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    for warning in differences(a, b):
        console.print(escape(f"warning: {warning}"), soft_wrap=True)
    ours, theirs = ({row.name: row for row in done(record.timed)} for record in (a, b))
    table = make_table(["row"], ["A (s)", "B (s)", "ratio", f"{_CONFIDENCE:.0%} interval", "B is"])
    found: dict[str, Verdict] = {}
    for name in [name for name in ours if name in theirs]:
        one = found[name] = judge(ours[name].times, theirs[name].times)
        interval = "" if np.isnan(one.low) else f"{one.low:.3f} to {one.high:.3f}"
        medians = (f"{rows[name].spread.median:.4g}" for rows in (ours, theirs))
        table.add_row(escape(name), *medians, f"{one.ratio:.3f}", interval, one.word)
    if found:
        console.print(table)
    for path, names in ((first, ours.keys() - theirs.keys()), (second, theirs.keys() - ours.keys())):
        for name in sorted(names):
            console.print(escape(f"only in {path}: {name}"), soft_wrap=True)
    console.print(f"{counted(len(found), 'common row')}. {RULE}")
    slow = [name for name, one in found.items() if fail_above is not None and one.low > fail_above]
    for name in slow:
        console.print(escape(f"slower than {fail_above:g} times: {name}"), soft_wrap=True)
    return int(bool(slow))


def differences(a: Record, b: Record) -> Iterator[str]:
    """Yield what else differs between two records: machine, versions, settings, networks."""
    for what in ("machine", "versions", "options", "asked"):
        ours, theirs = getattr(a, what), getattr(b, what)
        for name in dict.fromkeys([*ours, *theirs]):
            if ours.get(name) != theirs.get(name):
                yield f"{what}.{name} is {ours.get(name)!r:.80} in A and {theirs.get(name)!r:.80} in B"
    others = {row.name: row for row in done(b.timed)}
    for row in done(a.timed):
        other = others.get(row.name)
        for what in ("versions", "layers", "sync"):
            if other is not None and getattr(row, what, None) != getattr(other, what, None):
                yield f"{row.name} has other {what} in B"
