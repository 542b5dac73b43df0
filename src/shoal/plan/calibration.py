"""What past runs taught: the ratio of measured to predicted seconds by phase, for a machine (no torch).

The ratio of a phase is the median over the runs that were measured, in logarithms, and drawn to 1: n steps
count n / (n + PRIOR), as if PRIOR more had been as predicted.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.plan.machine import stored
from shoal.plan.step_time import INSIDE, PHASES, StepTime
from shoal.runtime.files import cache_folder, read_json, write_json

PRIOR = 2  # steps
_MOST = 50  # measurements of a phase that are kept, the newest
_LIMIT = 20.0  # ratios are believed from 1/20 to 20
_LEAST_S = 1e-5  # shorter phases say nothing
_MOST_STEPS = 1 << 30
_REST = "rest"  # pseudo-phase: the seconds of a step relative to the sum of its phases
_VERSION = 1
Ratios = dict[str, dict[str, list[list[float]]]]  # by device and format, then phase: ratio, steps


def add_measurement(
    device: str,
    dtype: str,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    *,
    seconds: float,
    steps: int,
    setting: str = "",
    folder: Path | None = None,
) -> None:
    """Add the median seconds of each phase of a run's steps, and what was predicted without calibration.

    `seconds` is the median of a whole step. `device` and `dtype` name what computes; `setting` names the
    configuration and layout, whose own runs count before others.
    """
    whole = sum(measured[phase] for phase in PHASES if phase not in INSIDE)
    known = copy.deepcopy(_read(folder))
    for key in _keys(device, dtype, setting):
        entry = known.setdefault(key, {})
        pairs = {phase: (_net(predicted, phase), _net(measured, phase)) for phase in PHASES}
        for phase, (told, seen) in {**pairs, _REST: (whole, seconds)}.items():
            if min(told, seen) > _LEAST_S:
                ratio = min(_LIMIT, max(1 / _LIMIT, seen / told))
                entry[phase] = [*entry.get(phase, []), [round(ratio, 5), steps]][-_MOST:]
    file = _file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"version": _VERSION, "ratios": known})


def calibrated(
    step: StepTime, device: str, dtype: str, *, setting: str = "", folder: Path | None = None
) -> StepTime:
    """Return a step's time with each phase multiplied by its ratio.

    Raises:
        InputError: The file holds something else.
    """
    known = _read(folder)
    keys = _keys(device, dtype, setting)
    rest = _ratio(known, keys, _REST)
    phases = {phase: _net(step.phases, phase) * _ratio(known, keys, phase) * rest for phase in PHASES}
    inside = sum(phases[phase] for phase in INSIDE)
    both = phases["forward"] + phases["backward"]
    if inside and both:  # the waiting within them was taken out
        waiting = step.phases["forward"] / (step.phases["forward"] + step.phases["backward"])
        phases["forward"] += inside * waiting
        phases["backward"] += inside * (1 - waiting)
    return replace(step, phases=phases)


def _net(phases: Mapping[str, float], phase: str) -> float:
    """Return the seconds of a phase; of forward and backward together with no waiting within them.

    A run tells what was waited for in both, so that it is taken from each in proportion.
    """
    if phase not in ("forward", "backward"):
        return phases.get(phase, 0.0)
    both = phases["forward"] + phases["backward"]
    inside = sum(phases.get(name, 0.0) for name in INSIDE)
    return phases[phase] * max(0.0, 1 - inside / both) if both else 0.0


def _ratio(known: Mapping[str, Any], keys: list[str], phase: str) -> float:
    for key in reversed(keys):
        if found := known.get(key, {}).get(phase):
            steps = sum(count for _, count in found)
            return math.exp(
                steps / (steps + PRIOR) * statistics.median(math.log(ratio) for ratio, _ in found)
            )
    return 1.0


def _keys(device: str, dtype: str, setting: str) -> list[str]:
    """Return the names under which measurements are kept, from the general to the special one."""
    return [f"{device} {dtype}", *([f"{device} {dtype} {setting}"] if setting else [])]


def _file(folder: Path | None) -> Path:
    return (folder or cache_folder()) / "calibration.json"


def _read(folder: Path | None) -> Ratios:
    return stored(_file(folder), _load) or {}


@functools.lru_cache(maxsize=4)  # a search asks for each of its layouts
def _load(file: Path, _changed_ns: int, _size: int) -> Ratios:
    found = read_json(file, "calibration file")
    try:
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']}")
        known = found["ratios"]
        for entry in known.values():
            for phase, ratios in entry.items():
                if phase not in (*PHASES, _REST) or len(ratios) > _MOST:
                    raise ValueError(f"phase {phase} with {len(ratios)} ratios")
                for ratio, steps in ratios:
                    if not (1 / _LIMIT <= float(ratio) <= _LIMIT and 0 < int(steps) <= _MOST_STEPS):
                        raise ValueError(f"ratio {ratio} of {steps} steps in {phase}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not a calibration file: {error}", hint=f"delete {file}") from error
    return dict(known)
