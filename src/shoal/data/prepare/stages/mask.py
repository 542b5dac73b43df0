"""Replace personal data in texts by placeholders: e-mail addresses, IP addresses, telephone numbers."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

import pyarrow as pa

from shoal.data.prepare.stages.documents import Stage, StageSettings, with_columns, with_meta

# Reserved for examples by RFC 2606, 5737 and 3849; for fiction by the North American Numbering Plan.
EMAIL, IPV4, IPV6, PHONE = "email@example.com", "192.0.2.1", "2001:db8::1", "+1 202 555 0100"
_EMAIL = re.compile(
    r"(?<![\w.+%-])(?!git@)[A-Za-z0-9_][\w.+%-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,6}[A-Za-z]{2,24}(?![\w-]|\.\w)",
    re.ASCII,
)
_IPV4 = re.compile(r"\d(?<![\w.]\d)\d{0,2}(?:\.\d{1,3}){3}(?!\w|\.\w|-[A-Za-z])", re.ASCII)
_VERSION = re.compile(r"(?:\bv|version|release|\bver\.?)[\s:=\"']*$", re.IGNORECASE)
_IPV6 = re.compile(r"[23](?<![\w:.][23])[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,34}(?![\w:])", re.ASCII)
_PHONE = re.compile(r"\+(?<![\w+]\+)[1-9]\d{0,2}(?=[ ().-])(?:[ ().-]{1,2}\d{1,8}){2,6}(?!\w)", re.ASCII)


class Mask(StageSettings):
    """Personal data, replaced by placeholders that are reserved for examples.

    IP addresses are masked if they are public. Numbers such as 1.2.3.4 count as addresses, but not after
    `version`, `release` or `v`, before `-rc1`, or as part of a longer one. `git@HOST` stays.
    """

    name = "mask"
    what: tuple[Literal["email", "ip", "phone"], ...] = ("email", "ip")
    """What to mask: email, ip, phone. phone: numbers in groups of digits that begin with + and a country
    code."""

    def start(self) -> Stage:
        """Return the stage. The fact `masked` is the number of replacements in a document."""

        def stage(batch: pa.RecordBatch) -> pa.RecordBatch:
            found = [
                (text, 0) if text is None else self._masked(text) for text in batch.column("text").to_pylist()
            ]
            if not any(number for _, number in found):
                return batch
            changed = with_columns(batch, {"text": [text for text, _ in found]})
            return with_meta(changed, [{"masked": number} if number else None for _, number in found])

        return stage

    def _masked(self, text: str) -> tuple[str, int]:
        """Return the text with placeholders, and how many are new."""
        number = 0

        def replaced(match: re.Match[str]) -> str:
            nonlocal number
            new = _placeholder(match)
            number += new != match[0]
            return new

        if "email" in self.what and "@" in text:
            text = _EMAIL.sub(replaced, text)
        if "ip" in self.what:
            text = _IPV6.sub(replaced, _IPV4.sub(replaced, text))
        if "phone" in self.what and "+" in text:
            text = _PHONE.sub(replaced, text)
        return text, number


def _placeholder(match: re.Match[str]) -> str:
    """Return what takes the place of a match: itself, if it is no personal data."""
    found = match[0]
    if match.re is _EMAIL:
        return EMAIL
    if match.re is _PHONE:
        return PHONE if 8 <= sum(map(str.isdigit, found)) <= 15 else found  # 15: ITU-T E.164
    if match.re is _IPV4 and _VERSION.search(match.string, max(0, match.start() - 16), match.start()):
        return found
    try:
        public = ipaddress.ip_address(found).is_global
    except ValueError:
        return found
    return (IPV4 if match.re is _IPV4 else IPV6) if public else found
