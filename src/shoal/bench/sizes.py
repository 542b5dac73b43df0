"""Parse and format sizes in bytes, and rates of links."""

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


def parse_rate(words: str) -> float:
    """Parse 10mbit, 2.5gbit or 800kbit, where 1 kbit is 1,000 bits a second; return bytes a second.

    Raises:
        InputError: The text has none of these forms, or the rate is 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg])bit", words.strip().lower())
    rate = float(found[1]) * 1000 ** ("kmg".index(found[2]) + 1) / 8 if found else 0.0
    if not rate:
        raise InputError(f"{words!r} is not a link rate", hint="write 100mbit, 2.5gbit or 800kbit")
    return rate
