"""Where records lie, and how they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.bench.record import describe

RECORDS = Path(__file__).parent / "records"


def write_record(name: str, figures: dict[str, Any], folder: Path = RECORDS) -> Path:
    """Write FOLDER/NAME.json, with the machine, the versions and the moment, and say where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**describe(name), **figures}, indent=2) + "\n")
    print(f"record: {path}")
    return path
