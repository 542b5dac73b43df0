"""Scripts that write no spaces between words, and what of their characters stands for a word."""

from __future__ import annotations

Ranges = tuple[tuple[int, int], ...]  # first and last code points
# Iteration marks and Kana, Han in its blocks (Unicode, Blocks.txt).
IDEOGRAPHS: Ranges = (
    (0x3005, 0x3007), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x20000, 0x323AF),
)  # fmt: skip
# Thai, Lao and Tibetan; Burmese; Khmer.
SYLLABIC: Ranges = ((0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0xAA60, 0xAA7F))
UNSPACED_SHARE = 0.3  # of the letters, from which on a text has no words between spaces


def pattern(ranges: Ranges) -> str:
    """Return a regular expression for a run of characters in some ranges."""
    return f"[{''.join(f'{chr(first)}-{chr(last)}' for first, last in ranges)}]+"
