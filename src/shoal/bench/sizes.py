"""Parse and format sizes in bytes."""

from __future__ import annotations

import re

from shoal.errors import InputError

_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def parse_bytes(words: str) -> int:
    """Parse 64, 1KB or 1.5MB, where 1 KB is 1,024 bytes.

    Raises:
        InputError: The text has none of these forms.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?B|)", words.strip().upper())
    if not found:
        raise InputError(f"{words!r} is not a size", hint="write 4096, 64KB, 1.5MB or 1GB")
    return int(float(found[1]) * _UNITS[found[2]])


def in_words(num_bytes: int) -> str:
    """Format a size with the largest unit that it reaches."""
    unit = next(unit for unit in ("GB", "MB", "KB", "B") if num_bytes >= _UNITS[unit] or unit == "B")
    return f"{num_bytes / _UNITS[unit]:.4g} {unit}"
