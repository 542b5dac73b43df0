"""What every record says beside its figures: the machine, the versions and the moment."""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import version
from typing import Any

from shoal.runtime.device import bf16_is_native, logical_cores, physical_cores, select_device


def describe(name: str) -> dict[str, Any]:
    """Return the head of a record made here and now."""
    device = select_device("auto", 0, 1)
    return {
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
    }
