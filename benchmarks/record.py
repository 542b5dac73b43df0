"""What every record says beside its figures: the machine, the versions and the moment."""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shoal.runtime.device import bf16_is_native, logical_cores, physical_cores, select_device

RECORDS = Path(__file__).parent / "records"


def write_record(name: str, figures: dict[str, Any], folder: Path = RECORDS) -> Path:
    """Write FOLDER/NAME.json and say where it is."""
    device = select_device("auto", 0, 1)
    record = {
        "name": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "device": device.name,
            "bf16_in_hardware": bf16_is_native(device.torch_device),
            "physical_cores": physical_cores(),
            "logical_cores": logical_cores(),
            "system": platform.system(),
        },
        "versions": {"python": sys.version.split()[0], "torch": version("torch"), "shoal": version("shoal")},
        **figures,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"record: {path}")
    return path
