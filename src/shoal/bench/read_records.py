"""Records of `shoal bench`, read as files that anybody may have written: every field is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from shoal.bench.ceilings import Ceiling
from shoal.bench.layouts import Column
from shoal.bench.measured import Point
from shoal.bench.networks import Row
from shoal.bench.products import Way
from shoal.errors import InputError, counted
from shoal.plan.link_cost import Link
from shoal.runtime.files import read_json

_MOST_CHARACTERS, _MOST_VALUES, _DEPTH = 20_000, 100_000, 8
_SHORTEST_S = 1e-9
_MOST_ROWS, _MOST_GROUPS = 2_000, 24
_MAY_DIVERGE = ("loss", "norm")  # fields in which a number may be infinite, or none


@dataclass(frozen=True)
class Spread:
    """Median, fifth and 95th percentile."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        return self.low <= other.high and other.low <= self.high


class Timed:
    """Row with seconds a step, or the reason why there are none."""

    name: str  # in the record, once
    label: str  # in a picture
    times: Sequence[float]

    @cached_property
    def spread(self) -> Spread:
        """Seconds a step."""
        low, median, high = map(float, np.quantile(self.times, (0.05, 0.5, 0.95)))
        return Spread(median, low, high)


@dataclass
class NetworksRow(Row, Timed):
    """Row of `shoal bench networks`."""

    def __post_init__(self) -> None:
        if min(self.cell.batch, self.cell.threads) < 1:
            raise ValueError("batch and threads must be above 0")
        self.name, self.label = self.cell.name, f"{self.cell.framework} {self.cell.mode}"
        self.times, self.group = self.samples, self.cell.network

    @property
    def rate(self) -> Spread:
        """Samples a second."""
        one, batch = self.spread, self.cell.batch
        return Spread(batch / one.median, batch / one.high, batch / one.low)


@dataclass
class GradsyncRow(Timed):
    """Cell of `shoal bench gradsync`."""

    network: str
    workers: int
    link: str
    strategy: str
    global_batch_size: int
    status: Literal["done", "refused", "failed"]
    reason: str = ""
    delays_in_transport: bool = False
    layout: str = ""
    bytes_a_step: float | None = None
    communication_share: float = 0.0
    counted: bool = True
    curve: list[Point] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    skip: int = 0
    period: int = 1

    def __post_init__(self) -> None:
        words = (f"batch size {self.global_batch_size}", f"link {self.link}", self.layout)
        self.group = ", ".join(filter(None, (self.network, *words, "simulated" * self.delays_in_transport)))
        self.name, self.label = f"{self.strategy} x{self.workers}, {self.group}", self.strategy
        steps, period = self.step_s[max(0, self.skip) :], max(0, self.period) or len(self.step_s) or 1
        whole = [steps[at : at + period] for at in range(0, len(steps) - period + 1, period)]
        self.times = [float(np.mean(part)) for part in whole or [steps] if part]  # of whole periods


@dataclass
class CollectivesRow:
    """Row of `shoal bench collectives`."""

    algorithm: str
    size: int
    time_s: float
    busbw_bytes_per_s: float
    wrong: int


@dataclass
class ConvergenceRow:
    """Training of `shoal bench convergence`; `network` ends with its seed."""

    network: str
    workers: int
    global_batch_size: int
    status: Literal["done", "refused", "failed"]
    reason: str = ""
    curve: list[Point] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        steps = [point.step for point in self.curve]
        if self.status == "done" and not (
            len(steps) > 1
            and steps[0] >= 0
            and steps[-1] <= len(self.losses)
            and all(a < b for a, b in itertools.pairwise(steps))
        ):
            raise ValueError("a run that is done needs a curve, and the losses of its steps")

    @property
    def name(self) -> str:
        return f"{self.network}, {counted(self.workers, 'worker')}"


@dataclass(kw_only=True)
class Record:
    """What every record begins with."""

    name: str
    date: str = ""
    commit: str | None = None
    clean: bool | None = None
    load: dict[str, list[float]] = field(default_factory=dict)
    machine: dict[str, str | bool | int | float | None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    path: Path = Path()

    @property
    def kind(self) -> str:
        return self.name.partition("_")[0]

    @property
    def timed(self) -> list[Any]:
        """Rows that have samples, and those that should."""
        rows = (*getattr(self, "rows", ()), *getattr(self, "cells", ()))
        return [row for row in rows if isinstance(row, Timed)]


@dataclass(kw_only=True)
class NetworksRecord(Record):
    rows: list[NetworksRow]


@dataclass(kw_only=True)
class GradsyncRecord(Record):
    cells: list[GradsyncRow]


@dataclass(kw_only=True)
class CollectivesRecord(Record):
    ranks: int
    transport: str
    dtype: str
    links: dict[str, Link | None]
    rows: list[CollectivesRow]


@dataclass(kw_only=True)
class ConvergenceRecord(Record):
    cells: list[ConvergenceRow]


@dataclass(kw_only=True)
class LayoutsRecord(Record):
    rows: list[Column]

    def __post_init__(self) -> None:
        known = isinstance(self.options.get("per_step"), int) and {"unit", "steps"} <= self.options.keys()
        if not known:
            raise ValueError("options need unit, steps and per_step")


@dataclass(kw_only=True)
class CeilingsRecord(Record):
    rows: list[Ceiling]


@dataclass(kw_only=True)
class ProductsRecord(Record):
    rows: list[Way]


# A record is of the kind that its name begins with, up to an underscore: gradsync_grid is one of gradsync.
SCHEMAS: dict[str, type[Record]] = {
    "networks": NetworksRecord,
    "gradsync": GradsyncRecord,
    "collectives": CollectivesRecord,
    "convergence": ConvergenceRecord,
    "layouts": LayoutsRecord,
    "ceilings": CeilingsRecord,
    "products": ProductsRecord,
}


def load(path: Path) -> Record:
    """Read and check a record.

    Raises:
        InputError: It is no record of these kinds; the message names the file and the first wrong field.
    """
    if not path.exists():
        raise InputError(f"there is no record {path}", hint="shoal bench networks --output FILE writes one")
    raw = read_json(path, "record")
    name = raw.get("name") if isinstance(raw, dict) else None
    schema = SCHEMAS.get(name.partition("_")[0]) if isinstance(name, str) else None
    problem = next(_out_of_bounds(raw, "", 0), "")
    if schema is None or problem:
        problem = problem or f"name = {name!r:.60} is not that of a record"
        raise InputError(f"record {path}: {problem}", hint=f"known kinds: {', '.join(SCHEMAS)}")
    try:
        record: Record = TypeAdapter(schema).validate_python(raw | {"path": path, "raw": raw})
    except ValidationError as error:
        first = error.errors()[0]
        given = "" if isinstance(first["input"], dict) else f" = {first['input']!r:.60}"
        problem = f"{'.'.join(map(str, first['loc']))}{given}: {first['msg'].lower()}"
        raise InputError(
            f"record {path}: {problem}", hint=f"see shoal bench {schema.__name__[:-6].lower()}"
        ) from error
    _check_rows(record)
    return record


def _check_rows(record: Record) -> None:
    for row in record.timed:
        if row.status == "done" and not (row.times and min(row.times) > _SHORTEST_S):
            raise InputError(
                f"record {record.path}: the row {row.name} is done, and has no samples, or too short ones"
            )
    groups = len({row.group for row in record.timed})
    if len(record.timed) > _MOST_ROWS or groups > _MOST_GROUPS:
        raise InputError(
            f"record {record.path}: {len(record.timed):,} rows of {groups} networks and settings; "
            f"{_MOST_ROWS:,} of {_MOST_GROUPS} are allowed",
            hint="measure fewer networks into one record",
        )


def _out_of_bounds(value: Any, name: str, depth: int) -> Iterator[str]:
    """Yield what is longer, deeper or larger than any record has it, with the field."""
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        yield f"{name}: {len(value):,} characters, {_MOST_CHARACTERS:,} are allowed"
    elif isinstance(value, int | float) and not (abs(value) < 1e18 or any(w in name for w in _MAY_DIVERGE)):
        yield f"{name} = {value!r:.60}: too large, or no number"
    elif isinstance(value, list | dict):
        if depth > _DEPTH or len(value) > _MOST_VALUES:
            yield f"{name}: {len(value):,} values, {depth} deep; {_MOST_VALUES:,} and {_DEPTH} are allowed"
            return
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _out_of_bounds(inner, f"{name}.{key}".lstrip(".")[:200], depth + 1)


def done(rows: Sequence[Any]) -> list[Any]:
    """Return the rows that have a result."""
    return [row for row in rows if row.status == "done"]
