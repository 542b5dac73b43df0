"""Where records lie, and how they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.bench.record import begin, describe

RECORDS = Path(__file__).parent / "records"

begin()  # every benchmark imports this module before it measures


def write_record(name: str, figures: dict[str, Any], folder: Path = RECORDS) -> Path:
    """Write FOLDER/NAME.json: commit, machine, load, versions, moment, figures; and say where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**describe(name), **figures}, indent=2) + "\n")
    print(f"record: {path}")
    return path
